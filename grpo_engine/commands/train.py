"""grpo train: see parsing.py for its arguments."""

import os
import shlex
import shutil
import signal
import sys
import textwrap
from typing import TYPE_CHECKING

from ..disk import DiskError
from ..errors import Interrupted, UserError
from .common import fail, quiet

if TYPE_CHECKING:
    from ..data import Messages
    from ..ledger import Ledger
    from ..saving import State

STOPPED_EARLY = 3


def run(args: list[str]) -> int:
    """Trains; an error of a run that began leaves its traceback in the run folder.

    Returns STOPPED_EARLY where a guard or the early stop ended it: its weights are there.
    """
    from ..parsing import parse_run

    config, resume = parse_run(args)
    quiet()
    from ..ledger import Ledger
    from ..lock import InUse
    from ..trainer import Trainer

    out = config.out
    trainer = None
    try:
        trainer = Trainer(config, resume=resume)
        state = trainer.run()
    except Interrupted as stop:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is saved: nothing is left to stop
        print(
            f"stopped; the last whole step is saved in {out}; go on with --resume", file=sys.stderr
        )
        return 128 + stop.signum
    except InUse:
        raise
    except Exception as error:
        return _report(error, Ledger(out), began=trainer is not None)
    weights = out / config.weights_name
    if state.eval_before is not None and state.eval_last is not None:
        print(f"held-out reward {state.eval_before:.3f} -> {state.eval_last:.3f}{_unscored(state)}")
    print(f"run folder: {out}   weights: {weights}")
    example = _example(trainer.parts.train.prompt(0))
    print(f"next: {_program()} sample {shlex.quote(str(out))} {example}")
    return 0 if state.step >= config.train.steps else STOPPED_EARLY


def _report(error: Exception, ledger: "Ledger", began: bool) -> int:
    """One line for the user; the traceback goes into the run folder, unless that is another's."""
    known = isinstance(error, UserError | OSError)
    text = str(error) if known else f"unexpected {type(error).__name__}: {error}"
    if began and isinstance(error, DiskError):
        text += "; then go on from the newest checkpoint with --resume"
    if ledger.out.is_dir() and (began or not ledger.holds_run()):
        try:
            text += f" (traceback: {ledger.traceback(error)})"
        except OSError:
            pass  # the disk may be what failed
    elif not known:
        raise error
    return fail(text, code=2 if known else 1)


def _unscored(state: "State") -> str:
    if not state.eval_unscored:
        return ""
    return f" ({state.eval_unscored} answers have no reward and count as the lowest)"


def _program() -> str:
    """How this program was called, so that the printed command can be typed."""
    found = os.path.basename(sys.argv[0]) != "grpo" or shutil.which("grpo") == sys.argv[0]
    return "grpo" if found else shlex.quote(sys.argv[0])


def _example(prompt: "str | Messages") -> str:
    """The beginning of a prompt of the data as arguments of `grpo sample`."""
    chat = "" if isinstance(prompt, str) else "--chat "
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    words = textwrap.shorten(text[:200], 60, placeholder="")
    return chat + shlex.quote(words or text[:60])

"""The command line: `grpo COMMAND ...`. Errors are one line; exit code 2."""

import importlib
import os
import signal
import sys
from collections.abc import Sequence

from .commands.common import fail
from .errors import UserError
from .output import sturdy_output

USAGE = """usage: grpo COMMAND ...

  grpo train run.yaml [--resume] [--group.key value ...]   train; grpo train --help lists the keys
  grpo doctor [run.yaml] [--pilot 32]                       is all well here? is this run sound?
  grpo sample RUN PROMPT [-n 4]                             answers of a trained run
  grpo eval RUN [--data heldout.jsonl] [--samples 8]        what it earns on held-out tasks
  grpo rescore RUN --reward new.py:function                 its rollouts under another reward
  grpo export RUN OUT [--step 20] [--merge]                 its adapter or model as a folder
  grpo bench [--suite loss|head|sampler|step|all]           ours against others, here
"""
COMMANDS = "train doctor sample eval rescore export bench".split()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns 0, 1 for a fault of this program, 2 for one the user can mend, 3 for
    a run that ended before its last step, or 128 + the number of the signal that stopped it."""
    with sturdy_output():
        return _main(list(sys.argv[1:] if argv is None else argv))


def _main(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if args else 2
    if args[0] not in COMMANDS:
        return fail(f"no command {args[0]!r}; there are {', '.join(COMMANDS)}")
    if args[0] != "bench":  # which times the libraries as they come
        _let_waiting_threads_sleep_soon()
    try:
        return importlib.import_module(f".commands.{args[0]}", __package__).run(args[1:])
    except (UserError, OSError) as error:
        return fail(str(error))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _let_waiting_threads_sleep_soon() -> None:
    """OpenMP's threads spin while they wait for one another; with a core taken by anything else a
    small model then waits for time slices, and a run is several times slower. Never to spin costs
    60 % on an idle machine, 10,000 rounds nothing that could be measured. To be called before torch
    is imported; what the user has set stays."""
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "10000"


if __name__ == "__main__":
    sys.exit(main())

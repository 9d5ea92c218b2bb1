"""The command line: `grpo train | sample | export | bench`. Errors are one line; exit code 2."""

import argparse
import importlib.util
import logging
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from .errors import Interrupted, UserError

USAGE = """usage: grpo COMMAND ...

  grpo train run.yaml [--resume] [--group.key value ...]   train; grpo train --help lists the keys
  grpo sample RUN PROMPT [-n 4]                             answers of a trained run
  grpo export RUN OUT [--step 20] [--merge]                 its adapter or model as a folder
  grpo bench [--suite loss|head|sampler|step|all]           ours against others, here
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns 0, 1 for a fault of this program, 2 for one the user can mend, or
    128 + the number of the signal that stopped it."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if args else 2
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": train,
        "sample": sample,
        "export": export,
        "bench": bench,
    }
    if args[0] not in commands:
        return _fail(f"no command {args[0]!r}; there are {', '.join(commands)}")
    try:
        return commands[args[0]](args[1:])
    except (UserError, OSError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def train(args: list[str]) -> int:
    """grpo train: see parsing.py for its arguments."""
    from .parsing import parse_run

    config, resume = parse_run(args)
    _quiet()
    from .ledger import Ledger
    from .trainer import Trainer

    out = Path(config.train.out)
    trainer = None
    try:
        trainer = Trainer(config, resume=resume)
        state = trainer.run()
    except Interrupted as stop:
        print(f"stopped; the last whole step is saved in {out}; go on with --resume")
        return 128 + stop.signum
    except Exception as error:
        return _report(error, Ledger(out), began=trainer is not None)
    weights = out / config.weights_name
    if state.eval_before is not None and state.eval_last is not None:
        print(f"held-out reward {state.eval_before:.3f} -> {state.eval_last:.3f}")
    print(f"run folder: {out}   weights: {weights}")
    print(f"next: {_program()} sample {out} {_example(trainer.collector.train.prompts[0])}")
    return 0


def sample(args: list[str]) -> int:
    """grpo sample: the answers of a trained run to one prompt."""
    parser = argparse.ArgumentParser(
        prog="grpo sample", description="Answers of a trained run to one prompt."
    )
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("prompt", help="a text")
    parser.add_argument(
        "--chat", action="store_true", help="send it as a user's message (default: data.as_chat)"
    )
    parser.add_argument("-n", type=_positive, default=4, help="answers (default: 4)")
    parser.add_argument(
        "--temperature", type=_not_negative, default=1.0, help="0 is greedy (default: 1)"
    )
    parser.add_argument("--max-tokens", type=_positive, help="default: that of the run")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    given = parser.parse_args(args)
    _quiet()
    from .export import open_run
    from .prompts import encode_prompt, to_messages
    from .rollout import SamplingParams
    from .sampler import GroupSampler

    config, policy = open_run(given.run)
    prompt = to_messages(given.prompt, given.chat or config.data.as_chat, config.data.system)
    params = SamplingParams(
        temperature=given.temperature,
        max_tokens=given.max_tokens or config.sampling.max_tokens,
        seed=given.seed,
    )
    sampler = GroupSampler(policy.model, policy.tokenizer)
    ids = encode_prompt(policy.tokenizer, prompt)
    for rollout in sampler.generate([ids], given.n, params)[0]:
        print(policy.tokenizer.decode(rollout.completion_ids, skip_special_tokens=True))
    return 0


def export(args: list[str]) -> int:
    """grpo export: the weights of a run, or of one of its checkpoints, as a folder of its own."""
    parser = argparse.ArgumentParser(
        prog="grpo export", description="The weights of a run as a folder that other tools load."
    )
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("out", type=Path, help="the folder to make")
    parser.add_argument("--step", type=int, help="of this checkpoint (default: the final weights)")
    parser.add_argument(
        "--merge", action="store_true", help="the adapter merged into a copy of its base model"
    )
    given = parser.parse_args(args)
    _quiet()
    from .export import export_run

    export_run(given.run, given.out, given.step, given.merge)
    print(f"written: {given.out}")
    return 0


def bench(args: list[str]) -> int:
    """grpo bench: this project's kernels against others, on this machine."""
    parser = argparse.ArgumentParser(
        prog="grpo bench",
        description="Time and memory of the kernels against others; what is wrong is not timed.",
    )
    parser.add_argument("--suite", default="all", help="loss, head, sampler, step or all (default)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench"), help="default: runs/bench; overwritten"
    )
    parser.add_argument("--loss-shape", metavar="SxT", help="samples x tokens of each: 512x512")
    parser.add_argument(
        "--head-shape", metavar="NxDxV", help="tokens x hidden size x vocabulary: 2048x1024x151936"
    )
    parser.add_argument(
        "--shapes", choices=("full", "small"), default="full", help="small: does everything run?"
    )
    parser.add_argument(
        "--quick", action="store_true", help="without what holds all logits; smaller models sampled"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument("--threads", type=_positive, help="of the CPU (default: torch's choice)")
    parser.add_argument("--case", default="", help="words of its name or shape, e.g. 'generate 4m'")
    parser.add_argument("--rounds", type=_positive, default=9, help="at least 7 (default: 9)")
    given = parser.parse_args(args)
    if importlib.util.find_spec("transformers") is not None:
        _quiet()
    from .benchmarks.run import BenchConfig, faults, run

    found = faults(run(BenchConfig(**vars(given))))
    return _fail("; ".join(found), code=1) if found else 0


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; given {text}")
    return value


def _not_negative(text: str) -> float:
    if not 0 <= (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"must be finite and not negative; given {text}")
    return value


def _report(error: Exception, ledger: "Ledger", began: bool) -> int:  # noqa: F821
    """One line for the user; the traceback goes into the run folder, unless that is another's."""
    known = isinstance(error, UserError | OSError)
    text = str(error) if known else f"unexpected {type(error).__name__}: {error}"
    if ledger.out.is_dir() and (began or not ledger.holds_run()):
        try:
            text += f" (traceback: {ledger.traceback(error)})"
        except OSError:
            pass  # the disk may be what failed
    elif not known:
        raise error
    return _fail(text, code=2 if known else 1)


def _fail(text: str, code: int = 2) -> int:
    print(f"grpo: error: {' '.join(text.split())}", file=sys.stderr)
    return code


def _program() -> str:
    """How this program was called, so that the printed command can be typed."""
    return os.path.relpath(sys.argv[0]) if os.sep in sys.argv[0] else "grpo"


def _example(prompt: "str | Messages") -> str:  # noqa: F821
    """The beginning of a prompt of the data as arguments of `grpo sample`."""
    if isinstance(prompt, str):
        return shlex.quote(prompt[:60])
    return f"--chat {shlex.quote(prompt[-1]['content'][:60])}"


def _quiet() -> None:
    """No progress bars and advice of the libraries between our lines."""
    from .errors import require

    transformers = require("transformers", "train", "this command")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    warnings.filterwarnings("ignore", message="MatMul8bitLt: inputs will be cast")


if __name__ == "__main__":
    sys.exit(main())

"""A real model through all that a user does first, in both dtypes: `make real MODEL=FOLDER`.

Random weights hide what real ones do. Prints a table of figures beside their limits; exits with 1
if one is missed. Not collected by pytest: it needs a model, and minutes.
"""

import json
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as parquet
import torch
import yaml
from safetensors.torch import load_file
from steps import Row, adapter_rows, library_rows

GRPO = str(Path(sys.executable).with_name("grpo"))
DTYPES = "bfloat16", "float32"
# Nats a token, mean: guards.logp_gap; sums in another order.
GAP = {"bfloat16": 0.1, "float32": 1e-3}
REWARD = """
def vowels(completions, **columns):
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [sum(x in "aeiou" for x in text) / max(1, len(text)) for text in texts]
"""
TASKS = [
    f"Tell me in one sentence what you know of {x}." for x in ("bread", "rain", "Rome", "ants")
]


def config(folder: Path, model: Path, dtype: str, name: str, /, **changes: dict) -> Path:
    """The YAML of a run of 3 steps, LoRA on all linears, everything else by default."""
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    chat = "chat_template" in tokenizer or (model / "chat_template.jinja").exists()
    (folder / "vowels.py").write_text(REWARD)
    rows = "".join(json.dumps({"prompt": task}) + "\n" for task in TASKS)
    (folder / "tasks.jsonl").write_text(rows)
    tasks = str(folder / "tasks.jsonl")
    values = {
        "model": {"path": str(model), "dtype": dtype, "device": "cpu"} | changes.get("model", {}),
        "data": {"path": tasks, "eval_path": tasks, "as_chat": chat},
        "rewards": [{"function": f"{folder}/vowels.py:vowels"}],
        "sampling": {"group_size": 4, "max_tokens": 16},
        "groups": {"truncated": "keep"},
        "train": {
            "steps": 3,
            "prompts_per_step": 2,
            "lr": 1e-4,
            "checkpoint_every": 1,
            "out": str(folder / name),
        }
        | changes.get("train", {}),
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def grpo(*args: object, codes: tuple[int, ...] = (0,)) -> str:
    """What a command prints; RuntimeError with it for another exit code."""
    done = subprocess.run([GRPO, *map(str, args)], capture_output=True, text=True)
    if done.returncode not in codes:
        raise RuntimeError(
            f"grpo {' '.join(map(str, args))}: exit code {done.returncode}\n"
            f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return done.stdout


def steps_of(run: Path) -> list[dict]:
    """The lines of a run's steps, evaluations left out."""
    file = run / "metrics.jsonl"
    lines = [json.loads(x) for x in file.read_text().splitlines()] if file.exists() else []
    return [line for line in lines if "loss" in line]


def trained_rows(run: Path, limit: float) -> Iterator[Row]:
    """Sampler against trainer, and what a first step must be."""
    steps = steps_of(run)
    yield Row("sampler - trainer", max(s["logp_gap"] for s in steps), limit)
    yield Row("ratio - 1, step 1", abs(steps[0]["ratio_mean"] - 1), 0.0)
    yield Row("KL, step 1", abs(steps[0]["kl"]), 1e-6)
    yield Row("steps without gradient", sum(not s["grad_norm"] > 0 for s in steps), 0)


def killed_and_resumed(yaml_file: Path, run: Path) -> None:
    """kill -9 after the second step, then --resume."""
    process = subprocess.Popen(
        [GRPO, "train", str(yaml_file)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while len(steps_of(run)) < 2 and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    grpo("train", yaml_file, "--resume")


def differing(a: Path, b: Path) -> int:
    """Weights that are not bitwise those of the other file."""
    first, second = load_file(a), load_file(b)
    return len(first.keys() ^ second.keys()) + sum(
        not torch.equal(tensor, second[name]) for name, tensor in first.items()
    )


def run_rows(folder: Path, model: Path, dtype: str) -> Iterator[Row]:
    """The commands on one run."""
    run, again = folder / "run", folder / "again"
    file = config(folder, model, dtype, "run")
    grpo("train", file)
    yield from trained_rows(run, GAP[dtype])
    killed_and_resumed(config(folder, model, dtype, "again"), again)
    weights = "adapter/adapter_model.safetensors"
    yield Row("resumed: other weights", differing(run / weights, again / weights), 0)

    said = grpo("sample", run, TASKS[0], "-n", 2, "--max-tokens", 8).strip()
    yield Row("sample: no answer", int(not said), 0)
    grpo("eval", run, "--run-rewards", "--out", folder / "answers.jsonl")
    answers = [json.loads(x)["reward"] for x in (folder / "answers.jsonl").read_text().splitlines()]
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["eval_reward"]
    yield Row("eval - evaluation in training", abs(sum(answers) / len(answers) - last), 1e-6)
    grpo("doctor", file, "--json", folder / "doctor.json", codes=(0, 2))
    checks = json.loads((folder / "doctor.json").read_text())["checks"]
    # Whether one of 4 answers ends within 16 tokens is up to the model.
    failed = sum(c["status"] == "FAIL" and c["name"] != "EOS reached" for c in checks)
    yield Row("doctor: failed checks", failed, 0)
    grpo("rescore", run, "--run-rewards", "--out", folder / "both.parquet")
    both = parquet.read_table(folder / "both.parquet").to_pylist()
    moved = sum(abs(s["old_reward"] - s["new_reward"]) > 1e-6 for s in both)
    yield Row("rescore: moved rewards", moved, 0)
    grpo("export", run, folder / "adapter")
    grpo("export", run, folder / "merged", "--merge")
    yield from adapter_rows(run, model, folder / "adapter", folder / "merged", GAP[dtype])


def quantised_rows(folder: Path, model: Path, dtype: str, base: str) -> Iterator[Row]:
    """Two steps on quantised linears."""
    changes = {"model": {"base": base}, "train": {"steps": 2}}
    grpo("train", config(folder, model, dtype, base, **changes))
    for row in trained_rows(folder / base, GAP[dtype]):
        yield Row(f"{base}: {row.name}", row.value, row.limit)
    said = grpo("sample", folder / base, TASKS[0], "-n", 1, "--max-tokens", 8).strip()
    yield Row(f"{base}: sample: no answer", int(not said), 0)


def sections(folder: Path, model: Path, dtype: str) -> Iterator[Iterator[Row]]:
    """All of it in one dtype; what raises leaves the sections after it standing."""
    yield run_rows(folder, model, dtype)
    for base in ("8bit", "4bit"):
        yield quantised_rows(folder, model, dtype, base)
    yield library_rows(model, dtype, TASKS[:2], GAP[dtype])


def main() -> int:
    """The table; 1 if a limit is missed."""
    if len(sys.argv) != 2 or not sys.argv[1]:
        print("skipped: no real model given; make real MODEL=FOLDER, in the transformers format")
        return 0
    model, missed = Path(sys.argv[1]).expanduser().resolve(), 0
    for dtype in DTYPES:
        with tempfile.TemporaryDirectory(prefix="grpo-real-") as folder:
            for section in sections(Path(folder), model, dtype):
                try:
                    for row in section:
                        print(f"{dtype:9} {row}", flush=True)
                        missed += not row.holds
                except Exception:
                    traceback.print_exc()
                    missed += 1
    print(f"{missed} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

"""The program as it is typed: signals, kill -9, a full disk, a stranger's model, sample, export."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM

from conftest import CHARS, make_model, make_tokenizer, write_jsonl
from grpo_engine.checkpoint import list_checkpoints, load_checkpoint
from grpo_engine.cli import main

GRPO = [sys.executable, "-m", "grpo_engine.cli"]
REWARD = """
import time
def digits(completions, **columns):
    time.sleep(0.02)
    return [sum(map(str.isdigit, c)) / max(1, len(c)) for c in completions]
"""


@pytest.fixture
def workplace(tmp_path: Path, model_folder: Path) -> Path:
    """A folder with a run.yaml of many short steps."""
    rows = [{"prompt": f"{i} apples and {i} pears", "answer": str(2 * i)} for i in range(8)]
    write_jsonl(tmp_path / "data.jsonl", rows)
    (tmp_path / "my.py").write_text(REWARD)
    config = {
        "model": {"path": str(model_folder), "dtype": "float32"},
        "lora": {"rank": 4},
        "data": {"path": "data.jsonl"},
        "rewards": [{"function": "my.py:digits"}],
        "sampling": {"group_size": 2, "max_tokens": 4},
        "train": {
            "steps": 100_000,
            "prompts_per_step": 2,
            "warmup": 0.0,
            "checkpoint_every": 2,
            "out": "run",
        },
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def start(workplace: Path, *args: str) -> subprocess.Popen:
    return subprocess.Popen(
        [*GRPO, "train", "run.yaml", *args],
        cwd=workplace,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_steps(workplace: Path, steps: int, process: subprocess.Popen) -> None:
    metrics = workplace / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") < steps:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def steps_written(workplace: Path) -> list[int]:
    lines = (workplace / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_saves_the_last_whole_step_and_the_run_goes_on(workplace, signum, code):
    process = start(workplace)
    wait_for_steps(workplace, 3, process)
    process.send_signal(signum)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    assert "--resume" in err and "Traceback" not in err
    newest = load_checkpoint(list_checkpoints(workplace / "run" / "checkpoints")[-1])
    done = steps_written(workplace)
    assert done == list(range(1, newest.values["state"]["step"] + 1))
    more = str(len(done) + 2)
    finished = start(workplace, "--resume", "--train.steps", more)
    out, err = finished.communicate(timeout=120)
    assert finished.returncode == 0, err
    said = f"resuming at step {len(done)} of {more} (checkpoint step-{len(done):06d})"
    assert out.splitlines()[0] == said
    assert steps_written(workplace) == list(range(1, len(done) + 3))
    assert (workplace / "run" / "adapter" / "adapter_model.safetensors").is_file()


def test_a_key_held_down_stops_as_once(workplace):
    process = start(workplace)
    wait_for_steps(workplace, 3, process)
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.005)
    _, err = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in err and "Exception ignored" not in err
    newest = load_checkpoint(list_checkpoints(workplace / "run" / "checkpoints")[-1])
    assert steps_written(workplace)[-1] == newest.values["state"]["step"]


def test_kill_9_at_any_moment_leaves_a_checkpoint_that_loads(workplace):
    config = yaml.safe_load((workplace / "run.yaml").read_text())
    config["train"]["checkpoint_every"] = 1  # most of the time is then spent in writing
    (workplace / "run.yaml").write_text(yaml.safe_dump(config))
    steps = 0
    for round_number in range(4):
        process = start(workplace, *(["--resume"] if steps else []))
        wait_for_steps(workplace, steps + 3, process)
        time.sleep(0.037 * round_number)
        process.kill()
        process.communicate()
        newest = load_checkpoint(list_checkpoints(workplace / "run" / "checkpoints")[-1])
        assert newest.values["state"]["step"] > steps
        steps = newest.values["state"]["step"]
    finished = start(workplace, "--resume", "--train.steps", str(steps + 1))
    assert finished.wait(timeout=120) == 0, finished.communicate()
    assert steps_written(workplace) == list(range(1, steps + 2))


def test_a_full_disk_is_one_line_and_keeps_the_last_checkpoint(workplace):
    process = start(workplace, "--train.steps", "2")
    assert process.wait(timeout=120) == 0, process.communicate()
    before = load_checkpoint(list_checkpoints(workplace / "run" / "checkpoints")[-1])

    def no_room() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (16_000, 16_000))  # below a checkpoint's size

    run = subprocess.run(
        [*GRPO, "train", "run.yaml", "--resume", "--train.steps", "9"],
        cwd=workplace,
        preexec_fn=no_room,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 2, run
    lines = run.stderr.splitlines()
    assert [line for line in lines if line.startswith("grpo: error: can't write to run")], lines
    assert "Traceback" not in run.stderr
    newest = list_checkpoints(workplace / "run" / "checkpoints")
    assert load_checkpoint(newest[-1]).values == before.values
    assert not list((workplace / "run" / "checkpoints").glob(".*"))


def logits_in_a_fresh_process(code: str) -> torch.Tensor:
    """Runs code that prints a list of logits."""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return torch.tensor(json.loads(run.stdout.splitlines()[-1]))


def test_a_strangers_model_learns_resumes_and_exports(tmp_path, monkeypatch, capsys):
    """Another family, pad == eos, an EOS set of two, word problems, a reward file, LoRA r 16."""
    monkeypatch.chdir(tmp_path)
    model = make_model("qwen3", tie_word_embeddings=True)
    model.generation_config.eos_token_id = [1, 3 + CHARS.index(".")]
    model.save_pretrained("stranger")
    tokenizer = make_tokenizer(bos=True, chat=True)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained("stranger")
    problems = [
        {
            "question": [{"role": "user", "content": f"Tom has {i} nuts and finds {i + 1}"}],
            "solution": f"#### {2 * i + 1}",
        }
        for i in range(9)
    ]
    write_jsonl(Path("words.jsonl"), problems)
    Path("shape.py").write_text(
        "def shape(prompts, completions, completion_ids, solution, **rest):\n"
        "    texts = [c[0]['content'] for c in completions]\n"
        "    return [{'digits': sum(map(str.isdigit, t)) / max(1, len(t)), 'short': None}\n"
        "            for t in texts]\n"
    )
    Path("run.yaml").write_text(
        yaml.safe_dump(
            {
                "model": {"path": "./stranger", "dtype": "float32"},
                "lora": {"rank": 16},
                "data": {
                    "path": "words.jsonl",
                    "prompt_column": "question",
                    "answer_column": "solution",
                },
                "rewards": [{"function": "shape.py:shape"}, {"function": "math", "weight": 0.1}],
                "sampling": {"group_size": 8, "max_tokens": 6},
                "groups": {"truncated": "keep"},
                "train": {"steps": 16, "prompts_per_step": 4, "lr": 2e-2, "out": "run"},
            }
        )
    )
    assert main(["train", "run.yaml"]) == 0
    assert main(["train", "run.yaml", "--resume", "--train.steps", "20"]) == 0
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert lines[0]["reward"] < 0.25 and lines[-1]["reward"] > 0.5
    assert any(line["truncated"] < 1 for line in lines)  # some ended, on one of the two EOS

    assert main(["export", "run", "copy"]) == 0
    assert main(["export", "run", "merged", "--merge"]) == 0
    ids = [[2, 5, 9, 20, 30]]
    load = "from transformers import AutoModelForCausalLM as A; import torch, json\n"
    show = f"\nprint(json.dumps(m.eval()(torch.tensor({ids})).logits[0].tolist()))"
    adapter = logits_in_a_fresh_process(
        load + "from peft import PeftModel\n"
        "m = PeftModel.from_pretrained(A.from_pretrained('./stranger'), 'copy')" + show
    )
    merged = logits_in_a_fresh_process(load + "m = A.from_pretrained('merged')" + show)
    base = AutoModelForCausalLM.from_pretrained("./stranger").eval()
    plain = base(torch.tensor(ids)).logits[0]
    ours = PeftModel.from_pretrained(base, "run/adapter").eval()(torch.tensor(ids)).logits[0]
    torch.testing.assert_close(adapter, ours.detach(), rtol=0, atol=1e-5)
    torch.testing.assert_close(merged, adapter, rtol=0, atol=1e-3)
    assert (adapter - plain).abs().max() > 0.1  # the adapter does something

    capsys.readouterr()
    assert main(["sample", "run", "Tom has 3 nuts", "-n", "3", "--max-tokens", "6"]) == 0
    answers = capsys.readouterr().out.splitlines()
    assert len(answers) == 3
    assert sum(map(str.isdigit, "".join(answers))) > 0.3 * len("".join(answers))

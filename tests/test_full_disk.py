"""What the disk refuses, at any byte, is one kind of error; the run goes on as undisturbed."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
import torch

from grpo_engine import ledger as ledger_module
from grpo_engine.checkpoint import list_checkpoints, load_checkpoint
from grpo_engine.config import LoraConfig, RunConfig
from grpo_engine.disk import DiskError, append_line, write_text
from grpo_engine.errors import Interrupted
from grpo_engine.trainer import Trainer
from runs import StoppingTrainer, metrics_of, tiny_config

TIMES = ("time_ms", "tokens_per_s_sample", "tokens_per_s_train")


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """The system refuses every byte after the first `size` of a file, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def run_of(model_folder: Path, tmp_path: Path, name: str) -> RunConfig:
    (tmp_path / "eval.jsonl").write_text('{"prompt": "say b", "answer": "7"}\n')
    data = {"eval_path": str(tmp_path / "eval.jsonl"), "now": "2026-12-31"}
    train = {"steps": 4, "num_iterations": 2, "checkpoint_every": 2, "eval_every": 2}
    train |= {"audit_every": 2, "out": str(tmp_path / name)}
    return tiny_config(model_folder, tmp_path, lora=LoraConfig(rank=4), data=data, train=train)


def record_of(config: RunConfig) -> dict[str, object]:
    """All that a run leaves, times apart."""
    out = config.out
    lines = [{k: v for k, v in line.items() if k not in TIMES} for line in metrics_of(config)]
    found: dict[str, object] = {"metrics": lines}
    for path in (path for path in sorted(out.rglob("*")) if path.is_file()):
        name = str(path.relative_to(out))
        if path.suffix == ".parquet":
            found[name] = parquet.read_table(path).to_pylist()
        elif path.suffix in (".safetensors", ".md"):
            found[name] = path.read_bytes()
        else:
            found[name] = None
    return found


def test_a_run_on_a_disk_that_fills_up_anywhere_goes_on_as_undisturbed(
    model_folder,
    tmp_path,
    capsys,  # its output is no file
):
    whole = run_of(model_folder, tmp_path, "whole")
    Trainer(whole).run()
    expected = record_of(whole)
    sizes = {p.name: p.stat().st_size for p in whole.out.rglob("*") if p.is_file()}
    largest = max(sizes.values())
    line = (whole.out / "metrics.jsonl").read_bytes().index(b"\n") + 1
    edges = [sizes[".lock"], sizes["environment.json"], sizes["config.yaml"], line, 2 * line]
    edges += [sizes["metrics.jsonl"], sizes["adapter_model.safetensors"], largest]
    for i, limit in enumerate([5, *(edge - 1 for edge in edges), line + 7, largest // 3]):
        config = run_of(model_folder, tmp_path, str(i))
        with no_file_above(limit), pytest.raises(DiskError, match=rf"/{i}.*: File too large; make"):
            Trainer(config).run()
        assert not list(config.out.rglob("*.tmp"))
        begun = (config.out / "metrics.jsonl").exists()
        Trainer(config, resume=begun).run()
        assert record_of(config) == expected, limit


def test_a_line_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_line(path, "one é")
    for size in range(len("one é\ntwo\n".encode())):
        with no_file_above(size), pytest.raises(DiskError, match=r"metrics\.jsonl: File too large"):
            append_line(path, "two")
        assert path.read_text() == "one é\n"
    append_line(path, "two")
    assert path.read_text() == "one é\ntwo\n"


def test_a_text_is_replaced_whole_or_not_at_all(tmp_path):
    write_text(tmp_path / "a", "old")
    with no_file_above(2), pytest.raises(DiskError, match="/a: File too large; make room there"):
        write_text(tmp_path / "a", "new text")
    assert [p.read_text() for p in tmp_path.iterdir()] == ["old"]


def saved_steps(config: RunConfig) -> list[int]:
    found = list_checkpoints(config.out / "checkpoints")
    return [load_checkpoint(folder).values["state"]["step"] for folder in found]


OTHERS = [
    OSError(24, "Too many open files"),
    BlockingIOError(11, "Resource temporarily unavailable"),
    BrokenPipeError(32, "Broken pipe"),
    OSError(28, "No space left on device", "/elsewhere/of-a-reward"),
    ConnectionResetError(104, "Connection reset by peer"),
    ValueError("a bug"),
]


@pytest.mark.parametrize("error", OTHERS, ids=repr)
def test_what_is_no_error_of_the_run_folder_is_not_called_one(model_folder, tmp_path, error):
    config = tiny_config(model_folder, tmp_path, train={"steps": 3})
    trainer = Trainer(config)
    trainer.step()

    def fails(*_: object) -> None:
        raise error

    trainer.collector.collect = fails
    with pytest.raises(type(error)) as caught:
        trainer.run()
    assert caught.value is error and not isinstance(caught.value, DiskError)
    assert saved_steps(config) == [1]
    assert [line["step"] for line in metrics_of(config)] == [1]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("x")])
def test_after_an_error_of_the_device_the_step_is_saved_without_a_forward(
    model_folder, tmp_path, error
):
    config = tiny_config(model_folder, tmp_path, train={"steps": 3})
    trainer = Trainer(config)
    trainer.step()

    def fails(*_: object, **__: object) -> None:
        raise error

    trainer.collector.collect = trainer.saver._probe = fails
    with pytest.raises(type(error)) as caught:
        trainer.run()
    assert caught.value is error and caught.value.__context__ is None
    assert saved_steps(config) == [1]
    Trainer(config, resume=True).run()
    assert saved_steps(config)[-1] == 3


@pytest.mark.parametrize(
    ("error", "raised"), [(Interrupted(15), DiskError), (ValueError("a bug"), ValueError)], ids=repr
)
def test_the_first_error_counts_and_a_stop_that_could_not_be_saved(
    model_folder, tmp_path, capsys, error, raised
):
    config = tiny_config(model_folder, tmp_path, train={"steps": 3})
    trainer = Trainer(config)
    trainer.step()

    def fails(*_: object) -> None:
        raise error

    trainer._write_metrics()
    trainer.collector.collect = fails
    with no_file_above(30), pytest.raises(raised):
        trainer.run()
    assert saved_steps(config) == []
    told = "the last step could not be saved: can't write to" in capsys.readouterr().out
    assert told == (raised is ValueError)


def test_metrics_that_could_not_be_written_are_in_the_checkpoint(
    model_folder, tmp_path, monkeypatch
):
    config = tiny_config(model_folder, tmp_path, train={"steps": 3})
    trainer = Trainer(config)
    trainer.step()
    lost = dict(trainer.state.unwritten)

    def full(path: Path, line: str) -> None:
        raise DiskError("full")

    monkeypatch.setattr(ledger_module, "append_line", full)
    with pytest.raises(DiskError):
        trainer.run()
    monkeypatch.undo()
    assert saved_steps(config) == [1] and not (config.out / "metrics.jsonl").exists()
    Trainer(config, resume=True).run()
    first, *others = metrics_of(config)
    assert first == json.loads(json.dumps(lost)) and [line["step"] for line in others] == [2, 3]


def test_a_step_whose_samples_cannot_be_recorded_is_not_made(model_folder, tmp_path, monkeypatch):
    config = tiny_config(model_folder, tmp_path, train={"steps": 3})
    trainer = StoppingTrainer(config)
    trainer.stop_after = 2
    with pytest.raises(Interrupted):
        trainer.run()
    again = Trainer(config, resume=True)

    def full(*_: object) -> None:
        raise DiskError("full")

    again.ledger._write_part = full
    with pytest.raises(DiskError):
        again.run()
    assert saved_steps(config) == [2]
    Trainer(config, resume=True).run()
    names = sorted(p.name for p in (config.out / "rollouts").iterdir())
    assert names == [f"step-00000{step}.parquet" for step in (1, 2, 3)]


def test_an_audit_that_could_not_be_written_is_made_up(model_folder, tmp_path):
    config = tiny_config(model_folder, tmp_path, train={"steps": 3, "audit_every": 2})
    trainer = Trainer(config)

    def full(*_: object) -> None:
        raise DiskError("full")

    trainer.ledger.audit = full
    with pytest.raises(DiskError):
        trainer.run()
    assert saved_steps(config) == [2]
    Trainer(config, resume=True).run()
    assert [p.name for p in (config.out / "audit").iterdir()] == ["step-000002.md"]

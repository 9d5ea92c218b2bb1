"""Bad input ends in one clear line and exit code 2, and the traceback goes to a file."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from conftest import make_model, make_tokenizer, write_jsonl
from grpo_engine.cli import main
from grpo_engine.ledger import Ledger

ROWS = [{"prompt": f"say {word}", "answer": "7"} for word in ("one", "two", "three", "four")]
REWARDS = """
def fine(completions, **columns):
    return [float(len(c) % 3) for c in completions]
def raises(completions, **columns):
    return 1 / 0
def nothing(completions, **columns):
    pass
def nan(completions, **columns):
    return [float("nan")] * len(completions)
def none(completions, **columns):
    return [None] * len(completions)
def short(completions, **columns):
    return [1.0]
def words(completions, **columns):
    return ["good"] * len(completions)
"""


@pytest.fixture
def good(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    """The config of a run that works; tests spoil one thing."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "data.jsonl", ROWS)
    (tmp_path / "my.py").write_text(REWARDS)
    return {
        "model": {"path": str(model_folder), "dtype": "float32"},
        "data": {"path": "data.jsonl"},
        "rewards": [{"function": "my.py:fine"}],
        "sampling": {"group_size": 2, "max_tokens": 4},
        "train": {"steps": 2, "prompts_per_step": 2, "out": "run"},
    }


def fails(config: dict, capsys: pytest.CaptureFixture, *args: str, command: str = "train") -> str:
    """Runs it, holds it to the rules of an error, and returns the line."""
    Path("run.yaml").write_text(yaml.safe_dump(config))
    capsys.readouterr()
    assert main([command, "run.yaml", *args]) == 2
    text = capsys.readouterr().err
    assert text.startswith("grpo: error: ") and text.count("\n") == 1
    assert "Traceback" not in text and "unexpected" not in text
    return text


def test_the_good_config_works(good, capsys):
    Path("run.yaml").write_text(yaml.safe_dump(good))
    assert main(["train", "run.yaml"]) == 0
    assert "next: " in capsys.readouterr().out


def test_no_such_model_folder(good, capsys):
    good["model"]["path"] = "./nowhere"
    assert "no such model folder: ./nowhere" in fails(good, capsys)


def test_a_folder_without_a_tokenizer(good, capsys):
    make_model().save_pretrained("bare")
    good["model"]["path"] = "./bare"
    assert "no tokenizer in bare: put" in fails(good, capsys)


def test_a_model_folder_that_also_holds_an_adapter(good, capsys, model_folder):
    # transformers would load the adapter into the model, and it would be trained, or lost.
    shutil.copytree(model_folder, "both")
    Path("both/adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    good["model"]["path"] = "./both"
    assert "./both holds a model and an adapter" in fails(good, capsys)
    Path("both/config.json").unlink()
    assert "./both has no config.json: it is an adapter: give its base" in fails(good, capsys)


def test_a_name_that_is_neither_a_folder_nor_on_the_hub(good, capsys, monkeypatch):
    import transformers

    def offline(*_: object, **__: object) -> None:
        raise OSError("couldn't connect")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", offline)
    good["model"]["path"] = "owner/tiny-lama"
    assert "owner/tiny-lama is no folder here" in fails(good, capsys)


def test_a_tokenizer_of_another_model(good, capsys):
    make_model(vocab_size=20).save_pretrained("small")
    make_tokenizer().save_pretrained("small")
    good["model"]["path"] = "./small"
    assert "this tokenizer belongs to another model" in fails(good, capsys)


def test_empty_data(good, capsys):
    Path("data.jsonl").write_text("\n")
    assert "data.jsonl is empty" in fails(good, capsys)


def test_a_row_without_a_prompt(good, capsys):
    write_jsonl(Path("data.jsonl"), [ROWS[0], {"question": "?"}])
    line = fails(good, capsys)
    assert "row 1" in line and "question" in line and "data.prompt_column" in line


def test_a_prompt_with_no_room_for_one_token(good, capsys):
    write_jsonl(Path("data.jsonl"), [ROWS[0], {"prompt": "x" * 96, "answer": "7"}])
    line = fails(good, capsys)
    assert "row 1" in line and "96 tokens" in line and "no room" in line


def test_a_system_message_for_a_prompt_that_is_no_chat(good, capsys):
    chat = [{"role": "user", "content": "say one"}]
    write_jsonl(Path("data.jsonl"), [{**ROWS[0], "prompt": chat}, ROWS[1]])
    good["data"]["system"] = "Be brief."
    assert "the prompt of data.jsonl row 1 is a string" in fails(good, capsys)


def test_a_column_with_a_reserved_name(good, capsys):
    write_jsonl(Path("data.jsonl"), [{**ROWS[0], "step": 1}])
    assert "column 'step'" in fails(good, capsys)


@pytest.mark.parametrize("key", ["data.task_column", "variants.column"])
def test_a_column_that_no_row_has(good, capsys, key):
    section, name = key.split(".")
    good.setdefault(section, {})[name] = "knid"
    write_jsonl(Path("data.jsonl"), [{**row, "kind": "sum"} for row in ROWS])
    assert f"{key}: no row of data.jsonl has 'knid'; there are: " in fails(good, capsys)


def test_a_missing_answer_column(good, capsys):
    good["rewards"] = [{"function": "exact"}]
    write_jsonl(Path("data.jsonl"), [{"prompt": "a"}])
    assert "data.answer_column" in fails(good, capsys)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("raises", "the reward raises raised ZeroDivisionError"),
        ("nothing", "the reward nothing returned NoneType"),
        ("nan", "4 of 4 samples of this step have no reward: the reward nan returned nan"),
        ("none", "none returned None for all 4"),
        ("short", "the reward short returned 1 values for 4 completions"),
        ("words", "the reward words returned 'good'"),
        ("absent", "has no function absent"),
    ],
)
def test_a_reward_that_does_not_work(good, capsys, function, says):
    good["rewards"] = [{"function": f"my.py:{function}"}]
    assert says in fails(good, capsys)


def test_a_run_that_starts_after_all_leaves_no_error_of_the_attempt_before(good, capsys):
    good["rewards"] = [{"function": "nosuch"}]
    fails(good, capsys)
    assert Path("run/error.txt").exists()
    ledger = Ledger(Path("run"))
    ledger.create()
    assert not Path("run/error.txt").exists()
    ledger.traceback(ValueError("killed"))
    ledger.rewind(0)
    assert not Path("run/error.txt").exists()


@pytest.mark.parametrize("isolate", [True, False])
def test_the_place_in_a_reward_file_that_raised(good, capsys, isolate):
    good["rewards"] = [{"function": "my.py:raises", "isolate": isolate}]
    line = fails(good, capsys)
    assert "run/error.txt" in line
    number = Path("my.py").read_text().splitlines().index("    return 1 / 0") + 1
    assert f"division by zero (my.py:{number})" in line


def test_group_size_1(good, capsys):
    assert "sampling.group_size must be at least 2" in fails(
        good, capsys, "--sampling.group_size", "1"
    )


def test_a_run_folder_that_already_holds_a_run(good, capsys):
    Path("run.yaml").write_text(yaml.safe_dump(good))
    assert main(["train", "run.yaml"]) == 0
    line = fails(good, capsys)
    assert "run already holds a run" in line and "--resume" in line and "--train.out" in line


def test_a_failed_start_does_not_count_as_a_run(good, capsys):
    good["rewards"] = [{"function": "my.py:raises"}]
    fails(good, capsys)
    good["rewards"] = [{"function": "my.py:fine"}]
    Path("run.yaml").write_text(yaml.safe_dump(good))
    shutil.rmtree("run/checkpoints")  # the step 0 that was saved
    assert main(["train", "run.yaml"]) == 0


def test_resume_without_a_checkpoint(good, capsys):
    assert "holds no run to resume" in fails(good, capsys, "--resume")


def test_an_unknown_key_names_the_nearest(good, capsys):
    good["train"]["learning_rat"] = 1e-5
    assert "unknown key train.learning_rat" in fails(good, capsys)
    del good["train"]["learning_rat"]
    assert "the nearest is train.steps" in fails(good, capsys, "--train.stpes", "3")


def test_a_token_budget_below_the_longest_sample(good, capsys):
    line = fails(good, capsys, "--train.token_budget", "10")
    assert "set it to at least 13" in line  # "say three" is 9 tokens, and 4 may follow


def test_a_folder_that_can_not_be_written(good, capsys):
    Path("file").write_text("")
    assert "file/run" in fails(good, capsys, "--train.out", "file/run")


def test_adapter_for_another_model(good, capsys):
    Path("adapter").mkdir()
    Path("adapter/adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    assert "is no adapter" in fails(good, capsys, "--lora.adapter", "adapter")


def test_commands_that_are_not_there(capsys):
    assert main(["trane"]) == 2
    assert "no command 'trane'" in capsys.readouterr().err


def test_sample_and_export_of_no_run(tmp_path, capsys):
    assert main(["sample", str(tmp_path), "hello"]) == 2
    assert "is no run folder" in capsys.readouterr().err
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "is no run folder" in capsys.readouterr().err

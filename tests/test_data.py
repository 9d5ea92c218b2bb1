"""Tasks: the forms of the source agree, what can't be trained on is named, the order is a law."""

import json
import re
from collections import Counter
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from conftest import write_jsonl
from grpo_engine.config import RewardConfig
from grpo_engine.data import Task, TaskStream, fingerprint, load_tasks
from grpo_engine.errors import UserError
from grpo_engine.rewards.load import load_rewards
from grpo_engine.rewards.score import Scorer

CHAT = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}]
ROWS = [
    {"prompt": "1+1=", "answer": "2", "level": 1, "tags": ["easy", "sum"]},
    {"prompt": "19+4=", "answer": "23", "level": 2, "tags": []},
    {"prompt": "1+1=", "answer": None, "level": 3, "tags": ["twice"]},
]
TASKS = [
    Task(0, "1+1=", {"answer": "2", "level": 1, "tags": ["easy", "sum"]}),
    Task(1, "19+4=", {"answer": "23", "level": 2, "tags": []}),
    Task(2, "1+1=", {"answer": None, "level": 3, "tags": ["twice"]}),
]


def write_parquet(path: Path, rows: list[dict]) -> Path:
    schema = None if rows else pyarrow.schema([("prompt", pyarrow.string())])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), path)
    return path


def write_dataset(path: Path, rows: list[dict]) -> Path:
    dataset = (
        datasets.Dataset.from_list(rows) if rows else datasets.Dataset.from_dict({"prompt": []})
    )
    dataset.save_to_disk(str(path))
    return path


WRITERS = {"tasks.jsonl": write_jsonl, "tasks.parquet": write_parquet, "folder": write_dataset}


@pytest.fixture(params=WRITERS)
def written(request, tmp_path):
    """Writes rows in one of the three forms, returns the path."""
    return lambda rows: str(WRITERS[request.param](tmp_path / request.param, rows))


def lines(tmp_path: Path, *text: str) -> str:
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(text) + "\n")
    return str(path)


def test_every_form_gives_the_same_tasks(written):
    assert load_tasks(written(ROWS), "prompt") == TASKS


def test_every_form_gives_chat_messages_as_plain_lists(written):
    rows = [{"q": CHAT, "answer": "2"}, {"q": CHAT[1:], "answer": "2"}]
    assert load_tasks(written(rows), "q") == [
        Task(0, CHAT, {"answer": "2"}),
        Task(1, CHAT[1:], {"answer": "2"}),
    ]


def test_source_without_rows_is_an_error_in_every_form(written):
    path = written([])
    with pytest.raises(UserError, match=re.escape(path)):
        load_tasks(path, "prompt")


def test_folder_of_several_splits_names_their_paths(tmp_path):
    split = datasets.Dataset.from_list(ROWS)
    folder = tmp_path / "both"
    datasets.DatasetDict({"train": split, "validation": split}).save_to_disk(str(folder))
    with pytest.raises(UserError, match="several splits") as caught:
        load_tasks(str(folder), "prompt")
    assert f"{folder}/train" in str(caught.value)
    assert f"{folder}/validation" in str(caught.value)
    assert load_tasks(f"{folder}/validation", "prompt") == TASKS


def test_blank_lines_are_skipped_and_rows_counted_without_them(tmp_path):
    path = lines(tmp_path, "", '{"prompt": "a"}', "  ", "", '{"prompt": "b"}', "")
    assert load_tasks(path, "prompt") == [Task(0, "a", {}), Task(1, "b", {})]


@pytest.mark.parametrize("bad", ['{"prompt": "b"', "prompt: b", '{"prompt": "b"} trailing'])
def test_bad_json_names_its_line_in_the_file(tmp_path, bad):
    with pytest.raises(UserError, match=r"tasks\.jsonl line 3 "):
        load_tasks(lines(tmp_path, '{"prompt": "a"}', "", bad), "prompt")


@pytest.mark.parametrize("row", ['["prompt", "a"]', '"prompt"', "3", "null"])
def test_row_that_is_no_object_names_its_line(tmp_path, row):
    with pytest.raises(UserError, match=r"tasks\.jsonl line 2.*object"):
        load_tasks(lines(tmp_path, '{"prompt": "a"}', row), "prompt")


def test_row_without_a_prompt_names_the_row_and_lists_its_columns(tmp_path):
    path = lines(tmp_path, '{"question": "a"}', '{"query": "b", "answer": "c"}')
    with pytest.raises(UserError) as caught:
        load_tasks(path, "question")
    for part in ("row 1", "'question'", "query, answer", "data.prompt_column"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        None,
        7,
        [],
        ["a"],
        {"role": "user", "content": ""},
    ],
)
def test_prompt_that_is_neither_text_nor_chat_names_the_row(tmp_path, prompt):
    path = write_jsonl(tmp_path / "tasks.jsonl", [{"prompt": "a"}, {"prompt": prompt}])
    with pytest.raises(UserError, match="row 1: 'prompt' must be a string"):
        load_tasks(str(path), "prompt")


def test_prompt_that_ends_with_the_assistant_is_an_error(tmp_path):
    answered = [*CHAT, {"role": "assistant", "content": "2"}]
    path = write_jsonl(tmp_path / "tasks.jsonl", [{"prompt": answered}])
    with pytest.raises(UserError, match=r"row 0.*ends with an assistant message"):
        load_tasks(str(path), "prompt")
    # Earlier turns of the assistant are a conversation.
    goes_on = [*answered, {"role": "user", "content": "and 2+2?"}]
    path = write_jsonl(tmp_path / "tasks.jsonl", [{"prompt": goes_on}])
    assert load_tasks(str(path), "prompt") == [Task(0, goes_on, {})]


@pytest.mark.parametrize(
    ("name", "content"), [("tasks.csv", b"prompt\na\n"), ("tasks", b"{}"), ("t.txt", b"a")]
)
def test_unknown_kind_of_file_says_what_is_expected(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=re.escape(f"{name}: expected .jsonl, .parquet")):
        load_tasks(str(tmp_path / name), "prompt")


def test_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"no such data: .*absent\.jsonl"):
        load_tasks(str(tmp_path / "absent.jsonl"), "prompt")


@pytest.mark.parametrize("name", ["broken.parquet", "latin.jsonl", "folder"])
def test_source_that_cannot_be_read_is_named(tmp_path, name):
    if name == "folder":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_bytes(b'{"prompt": "\xe4"}')
    with pytest.raises(UserError, match=re.escape(str(tmp_path / name))):
        load_tasks(str(tmp_path / name), "prompt")


@pytest.mark.parametrize(
    "name",
    [
        "prompts",
        "completions",
        "completion_ids",
        "finish_reasons",
        "raw_completions",
        "prompt_tail",
        "step",
    ],
)
def test_column_called_like_an_argument_of_rewards_is_an_error_by_name(tmp_path, name):
    path = write_jsonl(tmp_path / "tasks.jsonl", [{"prompt": "a", name: "x"}])
    with pytest.raises(UserError, match=f"column '{name}'.*rename"):
        load_tasks(str(path), "prompt")


def test_columns_called_prompt_completion_and_group_reach_rewards_unchanged(tmp_path):
    # Fault 27: these are names of ours elsewhere, and of TRL's columns.
    rows = [
        {"q": "1+1=", "prompt": "P0", "completion": "C0", "group": 7, "sample": 1, "rewards": 0.5},
        {"q": "2+2=", "prompt": "P1", "completion": "C1", "group": 7, "sample": 2, "rewards": 0.1},
    ]
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def f(**arguments):\n"
        "    f.seen = arguments\n"
        "    return [1.0] * len(arguments['prompts'])\n"
    )
    tasks = load_tasks(str(write_jsonl(tmp_path / "tasks.jsonl", rows)), "q")
    assert [task.prompt for task in tasks] == ["1+1=", "2+2="]
    (loaded,) = load_rewards([RewardConfig(f"{reward}:f", isolate=False)])
    arguments = {
        "prompts": ["1+1=", "2+2="],
        "completions": ["x", "y"],
        "completion_ids": [[1]] * 2,
    }
    Scorer([loaded]).score(arguments, {n: [t.columns[n] for t in tasks] for n in tasks[0].columns})
    assert loaded.function.seen == {
        "prompts": ["1+1=", "2+2="],
        "completions": ["x", "y"],
        "completion_ids": [[1], [1]],
        "prompt": ["P0", "P1"],
        "completion": ["C0", "C1"],
        "group": [7, 7],
        "sample": [1, 2],
        "rewards": [0.5, 0.1],
    }


def test_builtin_arithmetic_holds_every_sum_of_two_digit_numbers_once():
    train = load_tasks("builtin:arithmetic", "prompt")
    heldout = load_tasks("builtin:arithmetic-eval", "prompt")
    assert len(heldout) == 200
    sums = Counter()
    for task in train + heldout:
        a, b = map(int, re.fullmatch(r"(\d\d)\+(\d\d)=", task.prompt).groups())
        assert task.columns == {"answer": str(a + b)}
        sums[a, b] += 1
    # 90 * 90 pairs, each in one of the two: nothing held out is trained on.
    assert len(sums) == 8100 and set(sums.values()) == {1}


def test_builtin_arithmetic_is_the_same_every_time():
    first, again = (load_tasks("builtin:arithmetic-eval", "prompt") for _ in range(2))
    assert first == again
    # Shuffled, so that the held-out head is no special kind of sum.
    assert len({task.prompt[:2] for task in first}) > 60


def test_unknown_builtin_names_those_there_are():
    with pytest.raises(UserError, match=r"'algebra'.*arithmetic and arithmetic-eval"):
        load_tasks("builtin:algebra", "prompt")


@pytest.mark.parametrize("tasks", [1, 2, 7, 50])
def test_every_epoch_of_the_stream_is_a_permutation(tasks):
    drawn = TaskStream(tasks, seed=3).take(0, 4 * tasks)
    for epoch in range(4):
        assert sorted(drawn[epoch * tasks : (epoch + 1) * tasks]) == list(range(tasks))


def test_epochs_and_seeds_give_different_orders():
    drawn = TaskStream(50, seed=3).take(0, 150)
    orders = [tuple(drawn[k : k + 50]) for k in (0, 50, 100)]
    orders += [tuple(TaskStream(50, seed=seed).take(0, 50)) for seed in (0, 4, 5)]
    assert len(set(orders)) == 6
    assert tuple(range(50)) not in orders


def test_position_of_the_stream_depends_on_nothing_but_the_seed():
    whole = TaskStream(7, seed=11).take(0, 40)
    stream = TaskStream(7, seed=11)
    # Backwards, in pieces that cross epochs, one by one: a resumed run starts anywhere.
    assert [stream.take(k, 1)[0] for k in reversed(range(40))] == whole[::-1]
    for start, count in [(33, 7), (5, 9), (0, 0), (13, 27)]:
        assert stream.take(start, count) == whole[start : start + count]


def test_fingerprint_is_that_of_the_content():
    copies = [Task(t.row, t.prompt, json.loads(json.dumps(t.columns))) for t in TASKS]
    assert fingerprint(copies) == fingerprint(TASKS)


CHANGED = {
    "prompt": [Task(0, "1+1= ", TASKS[0].columns), *TASKS[1:]],
    "value": [Task(0, "1+1=", {**TASKS[0].columns, "level": 2}), *TASKS[1:]],
    "type of a value": [Task(0, "1+1=", {**TASKS[0].columns, "level": "1"}), *TASKS[1:]],
    "inside a list": [Task(0, "1+1=", {**TASKS[0].columns, "tags": ["easy"]}), *TASKS[1:]],
    "a column more": [Task(0, "1+1=", {**TASKS[0].columns, "more": None}), *TASKS[1:]],
    "a column less": [Task(0, "1+1=", {"answer": "2", "level": 1}), *TASKS[1:]],
    "name of a column": [Task(0, "1+1=", {"gold": "2", "level": 1, "tags": []}), *TASKS[1:]],
    "order": [TASKS[1], TASKS[0], TASKS[2]],
    "a row less": TASKS[:2],
    "a row more": [*TASKS, TASKS[0]],
    "text to chat": [Task(0, [{"role": "user", "content": "1+1="}], TASKS[0].columns), *TASKS[1:]],
}


@pytest.mark.parametrize("change", CHANGED)
def test_fingerprint_changes_with(change):
    assert fingerprint(CHANGED[change]) != fingerprint(TASKS)

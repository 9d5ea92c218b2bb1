"""Rows as they come: each input gives its tasks, or one line that names the row and the column."""

import json
import re
from datetime import datetime
from decimal import Decimal
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from conftest import write_jsonl
from grpo_engine.data import Task, fingerprint, load_tasks
from grpo_engine.errors import UserError

A = {"role": "user", "content": "a"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}


def text_part(text: str) -> dict:
    return {"type": "text", "text": text}


FILES = {
    "BOM of UTF-8": b'\xef\xbb\xbf{"prompt": "\xc3\xa4"}\n',
    "UTF-16, little end first": '\ufeff{"prompt": "ä"}\n'.encode("utf-16-le"),
    "UTF-16, big end first": '\ufeff{"prompt": "ä"}\n'.encode("utf-16-be"),
    "CRLF and blank lines": b'\r\n{"prompt": "\xc3\xa4"}\r\n\r\n  \r\n',
    "no newline at the end": b'{"prompt": "\xc3\xa4"}',
    "escaped": b'{"prompt": "\\u00e4"}\n',
}


@pytest.mark.parametrize("content", FILES.values(), ids=FILES)
def test_file_in_another_dress_holds_the_same_row(tmp_path, content):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(content)
    assert load_tasks(str(path)) == [Task(0, "ä", {})]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tasks.json", '[\n {"prompt": "a"},\n {"prompt": "b", "n": 1}\n]\n'),
        ("tasks.json", '{"prompt": "a"}\n{"prompt": "b", "n": 1}\n'),
        ("TASKS.JSONL", '{"prompt": "a"}\n{"prompt": "b", "n": 1}\n'),
        ("tasks.ndjson", '{"prompt": "a"}\n{"prompt": "b", "n": 1}\n'),
    ],
)
def test_json_as_one_array_or_by_lines(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    assert load_tasks(str(tmp_path / name)) == [Task(0, "a", {}), Task(1, "b", {"n": 1})]


@pytest.mark.parametrize(
    "value",
    [2**70, -(10**30), 1e308, 5e-324, "", "\x00", "\u2028", "😀", [[]], {"": None}, "x" * 300_000],
    ids=lambda value: repr(value)[:12],
)
def test_value_of_a_column_reaches_the_task_unchanged(tmp_path, value):
    path = write_jsonl(tmp_path / "tasks.jsonl", [{"prompt": "a", "value": value}])
    assert load_tasks(str(path)) == [Task(0, "a", {"value": value})]


BAD_LINES = {
    '{"prompt": "a", "prompt": "b"}': "'prompt' stands twice",
    '{"prompt": "a", "meta": {"x": 1, "x": 1}}': "'x' stands twice",
    '{"prompt": "a\x00"}': "no JSON",
    "{'prompt': 'a'}": "no JSON",
    '{"prompt": "a"},': "no JSON",
    '{"prompt": "a", "n": ' + "1" * 5000 + "}": "no JSON",
    '{"prompt": "a", "n": ' + "[" * 200_000 + "}": "no JSON",
}


@pytest.mark.parametrize(("line", "says"), BAD_LINES.items(), ids=range(len(BAD_LINES)))
def test_line_that_is_no_row_is_named(tmp_path, line, says):
    (tmp_path / "tasks.jsonl").write_text(f'{{"prompt": "a"}}\n{line}\n')
    with pytest.raises(UserError, match=rf"tasks\.jsonl line 2 .*{says}"):
        load_tasks(str(tmp_path / "tasks.jsonl"))


@pytest.mark.parametrize(
    ("row", "column"),
    [
        (rb'{"prompt": "a \ud800"}', "prompt"),
        (rb'{"prompt": "a", "answer": ["\udc00"]}', "answer"),
        (rb'{"prompt": [{"role": "user", "content": "\ud83d"}]}', "prompt"),
        (b'{"prompt": "\xe4"}', "prompt"),  # Latin-1
        (rb'{"prompt": "a", "\ud800": 1}', r"\ud800"),
    ],
)
def test_half_of_a_character_names_row_and_column(tmp_path, row, column):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n' + row + b"\n")
    with pytest.raises(UserError, match=re.escape(f"row 1: the column '{column}' holds")):
        load_tasks(str(path))


CHATS = {
    "parts of text": ([{"role": "user", "content": [text_part("a"), text_part("b")]}], ["ab"]),
    "keys that are null": ([{**A, "name": None, "tool_calls": None}], ["a"]),
    "a call without content": ([A, {"role": "assistant", "tool_calls": [CALL]}, A], ["a", "", "a"]),
    "a call with null": (
        [A, {"role": "assistant", "content": None, "tool_calls": [CALL]}, A],
        ["a", "", "a"],
    ),
    "an answer of a tool": ([A, {"role": "tool", "name": "add", "content": "3"}], ["a", "3"]),
    "an empty text": ([{"role": "system", "content": ""}, A], ["", "a"]),
}


@pytest.mark.parametrize(("messages", "contents"), CHATS.values(), ids=CHATS)
def test_messages_have_text_and_no_null_keys(tmp_path, messages, contents):
    (task,) = load_tasks(str(write_jsonl(tmp_path / "tasks.jsonl", [{"prompt": messages}])))
    expected = [
        {key: value for key, value in message.items() if value is not None} | {"content": content}
        for message, content in zip(messages, contents, strict=True)
    ]
    assert task.prompt == expected


def test_parts_of_parquet_have_every_key(tmp_path):
    parts = [{"type": "text", "text": "a", "image_url": None}]
    rows = [
        {"prompt": [{"role": "user", "content": parts, "name": "x"}]},
        {"prompt": [{"role": "user", "content": parts, "name": None}]},
    ]
    path = tmp_path / "tasks.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert [task.prompt for task in load_tasks(str(path))] == [[{**A, "name": "x"}], [A]]


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "user", "content": None}, "content must be text or parts of text; given None"),
        ({"role": "user"}, "content must be text or parts of text; given None"),
        ({"role": "user", "content": 7}, "content must be text or parts of text; given 7"),
        ({"role": "user", "content": []}, r"content must be text or parts of text; given \[\]"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "'image_url'"),
        ({"role": "user", "content": [text_part("a"), {"type": "image", "text": "b"}]}, "'image'"),
        ({"role": "user", "content": ["a"]}, "part of type 'a'"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "part of type 'text'"),
        ({"role": None, "content": "a"}, "role must be a text like user; given None"),
        ({"role": 1, "content": "a"}, "role must be a text like user; given 1"),
        ({"from": "human", "value": "a"}, "role must be a text like user; given None"),
    ],
)
def test_message_that_is_no_text_names_row_and_message(tmp_path, message, says):
    path = write_jsonl(tmp_path / "tasks.jsonl", [{"prompt": "a"}, {"prompt": [A, message, A]}])
    with pytest.raises(UserError, match=f"row 1, message 1 of the prompt: .*{says}"):
        load_tasks(str(path))


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (b"\x89PNG", "bytes"),
        ({"bytes": b"\x89PNG", "path": None}, "bytes"),
        (datetime(2026, 1, 1), "datetime"),
        (Decimal("1.50"), "Decimal"),
        ([datetime(2026, 1, 1).date()], "date"),
    ],
)
def test_column_that_json_can_not_hold_names_row_and_column(tmp_path, value, kind):
    rows = [{"prompt": "a", "thing": None}, {"prompt": "b", "thing": value}]
    path = tmp_path / "tasks.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    with pytest.raises(UserError, match=rf"row 1: the column 'thing' .*\(a {kind}\): .*drop"):
        load_tasks(str(path))


def test_columns_of_parquet_that_json_can_hold(tmp_path):
    table = pyarrow.table(
        {
            "prompt": pyarrow.array(["a", "b"]).dictionary_encode(),
            "kind": pyarrow.array(["x", None]).dictionary_encode(),
            "pairs": pyarrow.array([[("k", 1)], []], pyarrow.map_("string", "int64")),
            "big": pyarrow.array([2**64 - 1, None], "uint64"),
            "nested": [{"x": [1.5]}, {"x": None}],
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "tasks.parquet")
    assert load_tasks(str(tmp_path / "tasks.parquet")) == [
        Task(0, "a", {"kind": "x", "pairs": {"k": 1}, "big": 2**64 - 1, "nested": {"x": [1.5]}}),
        Task(1, "b", {"kind": None, "pairs": {}, "big": None, "nested": {"x": None}}),
    ]


def test_two_columns_of_one_name_in_parquet(tmp_path):
    table = pyarrow.table([["a"], ["b"]], names=["prompt", "prompt"])
    pyarrow.parquet.write_table(table, tmp_path / "tasks.parquet")
    with pytest.raises(UserError, match=r"tasks\.parquet: it has two columns 'prompt'"):
        load_tasks(str(tmp_path / "tasks.parquet"))


def test_data_set_that_was_saved_with_a_format_gives_plain_values(tmp_path):
    rows = datasets.Dataset.from_list([{"prompt": "a", "n": [1, 2]}])
    rows.with_format("numpy").save_to_disk(str(tmp_path / "folder"))
    assert load_tasks(str(tmp_path / "folder")) == [Task(0, "a", {"n": [1, 2]})]


def test_fingerprint_refuses_what_has_an_address():
    with pytest.raises(TypeError):
        fingerprint([Task(0, "a", {"thing": object()})])


@pytest.mark.parametrize(
    ("name", "loaded"),
    [
        ("openai/gsm8k", "load_dataset('openai/gsm8k', split='train').to_json('gsm8k.jsonl')"),
        ("t.csv", "load_dataset('csv', data_files='t.csv', split='train').to_json('t.jsonl')"),
        ("t.tsv", "load_dataset('csv', data_files='t.tsv', sep='\\t', split='train')"),
    ],
)
def test_data_of_other_kinds_says_how_it_is_converted(tmp_path, monkeypatch, name, loaded):
    monkeypatch.chdir(tmp_path)
    if "." in name:
        Path(name).write_text("prompt,answer\na,1\n")
    with pytest.raises(UserError) as caught:
        load_tasks(name)
    assert loaded in str(caught.value)


def test_the_conversion_that_is_named_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("t.tsv").write_text("prompt\tanswer\na\tb\n")
    with pytest.raises(UserError) as caught:
        load_tasks("t.tsv")
    exec(str(caught.value).partition('-c "')[2].rstrip('"'))
    assert load_tasks("t.jsonl") == [Task(0, "a", {"answer": "b"})]
    assert json.loads(Path("t.jsonl").read_text()) == {"prompt": "a", "answer": "b"}

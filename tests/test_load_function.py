"""Functions by name: files are executed once, and what can't be loaded is told in one line."""

import inspect
import re
import sys

import pytest

from grpo_engine.errors import UserError
from grpo_engine.rewards.load_function import FunctionSpec, describe, load_function
from grpo_engine.rewards.workers import WorkerPool


def test_functions_of_one_file_share_its_module_until_it_changes(tmp_path):
    file = tmp_path / "my.py"
    file.write_text("seen = []\ndef f(): return seen\ndef g(): return seen\n")
    f, g = (load_function(FunctionSpec(f"{file}:{name}")) for name in "fg")
    assert f() is g()
    file.write_text("def f(): return 'new'\n")
    assert load_function(FunctionSpec(f"{file}:f"))() == "new"


def test_files_of_one_name_are_kept_apart(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "my.py").write_text(
            "from __future__ import annotations\n"
            "from dataclasses import dataclass\n"
            "@dataclass\n"  # looks its module up by name
            "class Rule:\n"
            "    name: str = __file__\n"
            "def f(): return Rule().name\n"
        )
    files = [f"{tmp_path}/{folder}/my.py" for folder in "aba"]
    assert [load_function(FunctionSpec(f"{file}:f"))() for file in files] == files


def test_functions_of_packages_and_relative_files_are_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.py").write_text("def f(): return 1\n")
    assert load_function(FunctionSpec("here.py:f"))() == 1
    assert load_function(FunctionSpec("os.path:join")) is __import__("os").path.join


def test_options_are_bound_and_no_longer_asked_for(tmp_path):
    file = tmp_path / "my.py"
    file.write_text(
        "def f(completions, low, *, high=9, **rest): return completions, low, high, rest"
    )
    spec = FunctionSpec(f"{file}:f", {"low": 1, "more": 2})
    bound = load_function(spec)
    assert bound(completions=[], high=5) == ([], 1, 5, {"more": 2})
    assert bound(completions=[], low=7) == ([], 1, 9, {"more": 2})
    assert list(inspect.signature(bound).parameters) == ["completions", "high", "rest"]
    assert spec.name == "f"


WRONG = {
    "no file": (None, "{file}:f", {}, "no such reward file: {file}"),
    "no function": ("def g(): pass", "{file}:f", {}, "{file} has no function f"),
    "no callable": ("f = 3", "{file}:f", {}, "{file} has no function f"),
    "import fails": (
        "import absent_one",
        "{file}:f",
        {},
        "my.py raised ModuleNotFoundError: .*_one",
    ),
    "syntax": ("def f(:", "{file}:f", {}, "my.py raised SyntaxError"),
    "exit": ("raise SystemExit('a\\nb')", "{file}:f", {}, "my.py raised SystemExit: a b"),
    "no option": ("def f(x): pass", "{file}:f", {"y": 1}, "options of f don't fit: .*'y'"),
    "no colon": ("def f(): pass", "{file}", {}, "names no function; give file.py:function"),
    "no Python": ("", "{file}.txt:f", {}, "{file}.txt is no Python file"),
    "no module": (None, "absent_two.sub:f", {}, "importing absent_two.sub raised ModuleNotFound"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_loaded_says_why_here_and_from_a_pool(tmp_path, case):
    content, target, options, message = WRONG[case]
    file = tmp_path / "my.py"
    if content is not None:
        file.write_text(content)
        (tmp_path / "my.py.txt").touch()
    spec = FunctionSpec(target.format(file=file), options)
    message = message.format(file=re.escape(str(file)))
    loaded = set(sys.modules)
    for attempt in (lambda: load_function(spec), lambda: WorkerPool([spec])):
        with pytest.raises(UserError, match=message) as caught:
            attempt()
        assert "\n" not in str(caught.value)
    if "raised" in message:
        new = set(sys.modules) - loaded
        assert "my" not in new and not [name for name in new if name.startswith("grpo_reward")]


def test_errors_are_described_in_one_short_line():
    assert describe(ValueError("two\n  lines")) == "ValueError: two lines"
    assert describe(KeyError()) == "KeyError"
    assert len(describe(ValueError("x" * 10_000))) < 320


def test_a_file_imports_what_lies_beside_it_at_once_and_later(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "beside_at_once.py").write_text("two = 2\n")
    (folder / "beside_later.py").write_text("three = 3\n")
    (folder / "json.py").write_text("")
    (folder / "my.py").write_text(
        "import json\nfrom beside_at_once import two\n"
        "def f():\n    from beside_later import three\n    return two * three\n"
        "def g(): return json.dumps(1)\n"
    )
    f, g = (load_function(FunctionSpec(f"{folder}/my.py:{name}")) for name in "fg")
    assert f() == 6
    assert g() == "1"
    assert sys.path.count(str(folder)) == 1

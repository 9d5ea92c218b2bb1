"""The reward python_tests: what passes, what does not, and that nothing is left behind."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo_engine.errors import UserError
from grpo_engine.rewards.builtin import python_tests
from grpo_engine.rewards.builtin import python_tests as reward
from grpo_engine.rewards.builtin.python_tests import CHILD, ENVIRONMENT

module = sys.modules[reward.__module__]
SQUARE = "def f(x):\n    return x * x\n"
TESTS = "assert f(2) == 4\nassert f(3) == 9\n"


def scores(codes, tests=TESTS, **options):
    return python_tests(list(codes), [tests] * len(codes), **options)


def test_code_is_taken_from_the_last_python_block_or_the_whole_text():
    codes = [
        SQUARE,
        f"First:\n```python\ndef f(x): return 0\n```\nbetter:\n```py\n{SQUARE}```\nDone.",
        f"```bash\nls\n```\nthen\n```python\n{SQUARE}```\n```text\n4 9\n```",
        f"```\n{SQUARE}",
        [{"role": "assistant", "content": SQUARE}],
        f"Here it is: {SQUARE}",
        "",
    ]
    assert scores(codes) == [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]


def test_all_or_nothing_and_the_share_of_the_asserts():
    codes = [SQUARE, "def f(x): return 4", "def f(x): return 0", "def f(x): return 4 - 3 * x"]
    tests = TESTS + "for i in range(3):\n    assert f(i) >= 0\nassert f(0) == 0\n"
    assert scores(codes, tests) == [1.0, 0.0, 0.0, 0.0]
    # 4 holds for f(2) and in the loop, 0 in the loop and for f(0); 4 - 3x fails at the loop's last.
    assert scores(codes, tests, partial=True) == [1.0, 0.5, 0.5, 0.0]


def test_asserts_behind_an_error_of_the_tests_do_not_hold():
    tests = "assert f(2) == 4\nx = f('a')\nassert f(3) == 9\n"
    assert scores([SQUARE], tests, partial=True) == [0.5]


def test_tests_may_be_a_list_and_a_test_without_asserts_holds_if_it_ends():
    rows = [["assert f(2) == 4", "f('a')", "f(1)", "y = f(3)\nassert y == 9"]]
    assert python_tests([SQUARE], rows, partial=True) == [0.75]
    assert python_tests([SQUARE], rows) == [0.0]
    assert python_tests([SQUARE], [rows[0][::2]]) == [1.0]


def test_a_row_without_tests_or_with_broken_ones_gives_none():
    assert python_tests([SQUARE] * 4, [None, "", [], "assert f("]) == [None] * 4


def test_the_form_of_humaneval():
    prompt = 'from typing import List\n\ndef total(xs: List[int]) -> int:\n    """The sum."""\n'
    test = (
        "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n"
    )
    body = "    return sum(xs)\n"
    whole = "def total(xs: List[int]) -> int:\n" + body  # without the import
    completions = [body, f"```python\n{whole}```", "    return 3\n", "def check(c): pass"]
    rows = {"test": [test] * 4, "entry_point": ["total"] * 4, "prompts": [prompt] * 4}
    assert python_tests(completions, **rows) == [1.0, 1.0, 0.0, 0.0]
    assert python_tests(completions, **rows, partial=True) == [1.0, 1.0, 0.5, 0.0]
    chats = [[{"role": "user", "content": prompt}]]
    rows = {"test": [test], "entry_point": ["total"], "prompts": chats}
    assert python_tests([body], **rows) == [1.0]


ALL, ISCLOSE = (
    "assert f(3) != 9\nassert all([f(2) == 4])",
    "import math\nassert math.isclose(f(3), 9)",
)
# Each passes its tests if what it tries works.
FAKES = {
    "exit": ("import sys\nsys.exit(0)", TESTS),
    "os._exit": ("import os\nos._exit(0)", TESTS),
    "exit when called": ("import os\ndef f(x): os._exit(0)", TESTS),
    "SystemExit when called": ("def f(x): raise SystemExit(0)", TESTS),
    "printed": ("import os\nprint('1.0', flush=True)\nos.write(1, b'1.0')\nos._exit(0)", TESTS),
    "written to every pipe": (
        "import os\nfor i in range(64):\n    try: os.write(i, b'k 1.0')\n"
        "    except OSError: pass\nos._exit(0)",
        TESTS,
    ),
    "AssertionError": (
        "import builtins\nbuiltins.AssertionError = None\ndef f(x): return 0",
        TESTS,
    ),
    "builtin": ("import builtins\nbuiltins.all = lambda x: True\ndef f(x): return 0", ALL),
    "builtin when called": (
        "import builtins\ndef f(x):\n    builtins.all = lambda x: True\n    return 0",
        ALL,
    ),
    "own builtin": ("def all(x): return True\ndef f(x): return 0", ALL),
    "math": ("import math\nmath.isclose = lambda *a: True\ndef f(x): return 0", ISCLOSE),
    "own math": (
        "import sys, types\nm = types.ModuleType('math')\nm.isclose = lambda *a: True\n"
        "sys.modules['math'] = m\ndef f(x): return 0",
        ISCLOSE,
    ),
    "not yet imported": (
        "import fractions\nfractions.Fraction = lambda x: 4\ndef f(x): return 4",
        "from fractions import Fraction\nassert f(2) == Fraction(1)",
    ),
    "frames": (
        "import sys\ndef f(x):\n    sys._getframe(1).f_globals['two'] = 2\n    return 2",
        "two = 4\nassert f(2) == two",
    ),
    "trace": ("import sys\ndef f(x):\n    sys.settrace(None)\n    return x * x", TESTS),
    "the harness": ("import __main__\n__main__._put_back\ndef f(x): return x * x", TESTS),
}


def test_faked_success_does_not_pass():
    codes, tests = zip(*FAKES.values(), strict=True)
    got = python_tests(list(codes), list(tests))
    assert dict(zip(FAKES, got, strict=True)) == dict.fromkeys(FAKES, 0.0)
    true = "def f(x): return 4.0 if x == 2 else 8.0 + (x == 3)"
    assert python_tests([true], [f"assert all([f(2) == 4])\n{ISCLOSE}"]) == [1.0]


def test_a_function_with_the_name_of_a_builtin_is_tested_by_its_entry_point():
    test = "def check(candidate):\n    assert candidate([3, 1]) == [1, 3]\n"
    codes = ["def sorted(xs): return xs", "def sorted(xs):\n    xs.sort()\n    return xs"]
    assert python_tests(codes, test=[test] * 2, entry_point=["sorted"] * 2) == [0.0, 1.0]


def test_ordinary_code_runs_under_the_guard():
    codes = [
        "from collections import namedtuple\nP = namedtuple('P', 'a')\n"
        "def f(x): return P(x).a ** 2",
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\n"
        "class P:\n    a: int\ndef f(x): return P(x).a ** 2",
        "import asyncio\nasync def g(x): return x * x\ndef f(x): return asyncio.run(g(x))",
        "import tempfile, os\ndef f(x):\n    with tempfile.TemporaryDirectory() as d:\n"
        "        open(os.path.join(d, 'a'), 'w').write(str(x * x))\n"
        "        return int(open(os.path.join(d, 'a')).read())",
        "for i in range(2000): print('x' * 1000)\n" + SQUARE,
        f"import os\nassert {set(os.environ)} & set(os.environ) <= {set(ENVIRONMENT)}\n{SQUARE}",
        "if __name__ == '__main__':\n    input()\n" + SQUARE,
    ]
    assert scores(codes) == [1.0] * len(codes)


def test_tests_may_use_numpy():
    tests = "import numpy as np\nassert np.allclose(f(np.array([1.0, 3.0])), [1, 9])"
    assert scores([SQUARE, "def f(x): return x"], tests, timeout_s=30) == [1.0, 0.0]


def test_what_reaches_out_is_refused(tmp_path):
    victim, secret = tmp_path / "victim", tmp_path / "folder"
    victim.write_text("kept")
    secret.mkdir()
    reaching = [
        "import socket\nsocket.socket()",
        "import socket\nsocket.create_connection(('127.0.0.1', 80))",
        "import os\nos.fork()",
        "import subprocess\nsubprocess.run(['true'])",
        "import os\nos.system('true')",
        "import os\nos.kill(os.getppid(), 9)",
        "import ctypes\nctypes.CDLL(None)",
        "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (99, 99))",
        "open('/proc/self/environ').read()",
        f"open({str(victim)!r}, 'w')",
        f"import os\nos.chdir('/')\nos.open({str(victim)!r}, os.O_RDWR)",
        f"import os\nos.remove({str(victim)!r})",
        f"import os\nos.rename({str(victim)!r}, 'x')",
        f"import os\nos.symlink({str(victim)!r}, 'x')",
        f"import shutil\nshutil.rmtree({str(secret)!r})",
        f"import os\nos.rmdir('folder', dir_fd=os.open({str(tmp_path)!r}, os.O_RDONLY))",
        "b = bytearray(1 << 30)",
        "x = 'a'\nwhile True: x += x",
        "open('big', 'wb').write(bytes(17 << 20))",
    ]
    codes = [f"{code}\n{SQUARE}" for code in reaching]
    assert dict(zip(reaching, scores(codes), strict=True)) == dict.fromkeys(reaching, 0.0)
    assert victim.read_text() == "kept" and secret.is_dir()


def test_code_that_does_not_end_is_killed_and_earns_nothing():
    loops = [
        "while True: pass",
        "while True:\n    try: pass\n    except BaseException: pass",
        "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))\n"
        "time.sleep(999)",
        "def f(x):\n    while True: pass",
    ]
    assert scores(loops, timeout_s=0.2, workers=4) == [0.0] * 4


@pytest.mark.parametrize("spaces", ["with name spaces", "without"])
def test_a_process_that_got_away_is_killed(spaces, tmp_path, monkeypatch):
    if spaces == "without":  # as where the kernel allows none: the subreaper must do
        child = tmp_path / "child.py"
        child.write_text(CHILD.read_text().replace("    _isolate(libc)\n", ""))
        shutil.copy(CHILD.with_name("python_plain.py"), tmp_path)
        monkeypatch.setattr(module, "CHILD", child)
    mark = f"{os.getpid()}{spaces == 'without':d}77"
    # This way to start a process has no audit event; setsid takes it out of the session.
    code = (
        "from multiprocessing.util import spawnv_passfds\n"
        f"spawnv_passfds(b'/bin/sh', [b'sh', b'-c', b'setsid sleep {mark} & sleep {mark}'], [])\n"
        "import time\ntime.sleep(0.2)\n"
    )
    assert scores([code + SQUARE, SQUARE]) in ([1.0, 1.0], [0.0, 1.0])
    assert not [p for p in Path("/proc").glob("[0-9]*/cmdline") if mark in read(p)]


def read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def test_a_caller_that_is_killed_takes_the_code_with_it():
    job = {"code": "while True: pass", "tests": [], "entry_point": None, "partial": False}
    job |= {"timeout_s": 300, "memory_mib": 512}
    program = (
        "import subprocess, sys\n"
        f"subprocess.run([sys.executable, '-I', {str(CHILD)!r}], input={json.dumps(job).encode()})"
    )
    caller = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    deadline = time.monotonic() + 60
    try:
        while len(children := descendants(caller.pid)) < 2:  # supervisor and runner
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        caller.kill()
        caller.wait()
    while any(read(Path(f"/proc/{pid}/cmdline")) for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def descendants(pid: int) -> list[int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        text = read(stat)
        if text:
            parents[int(stat.parent.name)] = int(text.rpartition(")")[2].split()[1])
    found = [pid]
    for parent in found:
        found += [child for child, p in parents.items() if p == parent]
    return found[1:]


def test_a_child_that_says_nothing_is_no_verdict(tmp_path, monkeypatch):
    broken = tmp_path / "child.py"
    broken.write_text("raise RuntimeError")
    monkeypatch.setattr(module, "CHILD", broken)
    assert scores([SQUARE]) == [None]


def test_without_columns_it_says_which_it_needs():
    with pytest.raises(UserError, match="needs a column `tests`, or `test` and `entry_point`"):
        python_tests([SQUARE])

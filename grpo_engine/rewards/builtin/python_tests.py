"""The reward for Python code that passes the row's tests, run in processes of its own."""

import ast
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ...errors import UserError
from .options import is_number, require_bool, require_int, require_option, text_of

CHILD = Path(__file__).with_name("python_child.py")
# One thread: numpy's would be refused, and its BLAS takes address space for each.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# The child keeps the time itself; this much later something is wrong with the machine.
STARTUP_S = 60
FENCED = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
PYTHON = ("python", "py", "python3", "")


def python_tests(
    completions: list,
    tests: list | None = None,
    test: list | None = None,
    entry_point: list | None = None,
    prompts: list | None = None,
    *,
    timeout_s: float = 5.0,
    memory_mib: int = 512,
    partial: bool = False,
    workers: int = 2,
) -> list[float | None]:
    """1 where the Python code of the completion passes all tests of its row, else 0.

    This is a guard, no sandbox: each sample runs in a process that is killed at `timeout_s`, with
    limits on memory, CPU time and files, no environment, a temporary folder, in name spaces without
    network and with process ids of its own where the kernel allows it, and an audit hook that
    refuses sockets, processes, ctypes, /proc and writes outside that folder. It stops what a model
    writes by accident and the usual ways to fake success; code that sets out to break out of a
    Python process can. Linux only.

    Tests see plain data: what the code returns of a class derived from int, str, list, ... is
    copied into one of these; an object of another class of its own is refused unless the tests name
    the class, and is never equal to plain data.

    The code is that of the last fenced Python block, else the whole text. Columns: `tests`, a
    string of asserts or a list of such; or in HumanEval's form `test`, which defines check(), and
    `entry_point`. With an entry point the prompt is put before code that doesn't define it (a
    continuation), and before any code if it is Python itself (it holds the imports). A task whose
    function has the name of a builtin needs `entry_point`: tests see the real builtins otherwise. A
    row without tests, or whose tests are no Python, gives None.

    timeout_s: of a sample, wall clock from the start of its code. memory_mib: its address space.
    partial: the share of the asserts that hold whenever they are reached, instead of all or
    nothing. workers: samples that run at a time.
    """
    ok = is_number(timeout_s) and timeout_s > 0
    require_option("python_tests", "timeout_s", timeout_s, ok, "a number above 0")
    require_int("python_tests", "memory_mib", memory_mib, 64)
    require_bool("python_tests", "partial", partial)
    require_int("python_tests", "workers", workers, 1)
    if not sys.platform.startswith("linux"):
        raise UserError("rewards: python_tests runs on Linux only: elsewhere nothing guards it")
    if completions and tests is None and test is None:
        raise UserError(
            "rewards: python_tests needs a column `tests`, or `test` and `entry_point`, in the data"
        )
    limits = {"timeout_s": timeout_s, "memory_mib": memory_mib, "partial": partial}
    jobs = []
    for i, completion in enumerate(completions):
        entry = entry_point[i] if entry_point else None
        own = _row_tests(tests[i] if tests else None, test[i] if test else None, entry)
        code = _code(text_of(completion), text_of(prompts[i]) if prompts else "", entry)
        jobs.append({"code": code, "tests": own, "entry_point": entry, **limits} if own else None)
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(_run, jobs))


def read_tests(value: Any) -> list[str]:
    """The tests of a row, [] for null; ValueError, which says why, for what can't be run."""
    tests = [value] if isinstance(value, str) else value or []
    if not isinstance(tests, list) or not all(isinstance(test, str) for test in tests):
        raise ValueError("tests are a text of asserts, or a list of such texts")
    if not all(map(_is_python, tests)):
        raise ValueError("it is no Python")
    return tests


def _row_tests(tests: str | Sequence[str] | None, test: str | None, entry: str | None) -> list[str]:
    found = [tests] if isinstance(tests, str) else list(tests or [])
    if test:
        found.append(f"{test}\n\ncheck({entry})\n" if entry else test)
    found = [t for t in found if t.strip()]
    return found if all(_is_python(t) for t in found) else []


def _code(text: str, prompt: str, entry: str | None) -> str:
    blocks = [b for b in FENCED.findall(text) if b[0].lower() in PYTHON]
    code = blocks[-1][1] if blocks else text
    if entry is None:
        return code
    if re.search(rf"^(?:async +)?(?:def|class) +{re.escape(entry)}\b", code, re.MULTILINE) is None:
        return prompt + code
    return f"{prompt}\n{code}" if _is_python(prompt) else code


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _run(job: dict | None) -> float | None:
    """The score; None if there is nothing to run, or the machine could not run it."""
    if job is None:
        return None
    with tempfile.TemporaryDirectory(prefix="grpo-tests-", ignore_cleanup_errors=True) as folder:
        with subprocess.Popen(
            # -I: nothing of the user's environment; utf8: the same text whatever the locale.
            [sys.executable, "-I", "-X", "utf8", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=ENVIRONMENT,
            start_new_session=True,
        ) as child:
            try:
                out, _ = child.communicate(
                    json.dumps(job).encode(), timeout=job["timeout_s"] + STARTUP_S
                )
            except subprocess.TimeoutExpired:
                out = b""
            finally:
                child.kill()
    return float(out) if out else None

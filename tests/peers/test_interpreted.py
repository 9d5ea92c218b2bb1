"""Runs interpreted.py in a process of its own: Triton's interpreter is chosen at import."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_triton_under_its_interpreter_against_the_peers():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", HERE / "interpreted.py"],
        cwd=HERE.parents[1],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr

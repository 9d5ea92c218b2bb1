"""The compiled kernels, without a GPU: what they need, and that the command would say so."""

import json
import os
import subprocess
import sys

import pytest

from grpo_engine.benchmarks.cubins import ARCHITECTURES, Usage, spread

SPILLING = """
import triton
import triton.language as tl


@triton.jit
def everything_at_once(x_ptr, y_ptr):
    at = tl.arange(0, 2048)
    x = tl.load(x_ptr + at)
    tl.debug_barrier()  # 64 registers a thread are alive here
    tl.store(y_ptr + at, x)


def specialisations():
    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32"}
    yield "spilling", everything_at_once, signature, {}, {"num_warps": 1, "maxnreg": 32}
"""
# Where the logits become half-size values in place: every warp's loads, a barrier, the stores.
ORDER = """
import json, sys
from grpo_engine.benchmarks.cubins import compile_copy, read_cubin
from grpo_engine.kernels.head_rows import specialisations

found = {}
for name, *copy in specialisations():
    if name in ("softmax/bf16", "gradient/bf16"):
        for arch in (80, 90):
            _, codes = read_cubin(compile_copy(*copy, arch).asm["cubin"])
            found[f"{name} {arch}"] = [c for c in codes if c in ("LDG", "BAR", "STG")]
print(json.dumps(found))
"""


COMMAND = ("-m", "grpo_engine.benchmarks.cubins")


def run(*command, **environment):
    """Python in a process of its own: here the kernels are interpreted, not compiled."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300
    )


# By kernel: registers a thread, warps and bytes of shared memory a program.
LIMITS = {
    "group_loss": (128, {4}, 1024),
    "softmax": (64, {16}, 256),
    "gradient": (64, {16}, 0),
    "sample": (64, {32}, 1024),
    "attend": (168, {4, 8}, 34816),
}


def test_six_copies_of_all_kernel_files_keep_to_their_ceilings(tmp_path):
    done = run(*COMMAND, "--sample", "6", "--json", str(tmp_path / "usage.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "usage.json").read_text())
    assert len({(row["name"], row["arch"]) for row in rows}) == 6
    assert {row["arch"] for row in rows} < set(ARCHITECTURES)
    assert {row["name"].split("/")[0] for row in rows} == set(LIMITS)
    for row in rows:
        assert row["spills"] == row["stack"] == row["local"] == 0, row
        assert row["faults"] == []
        registers, warps, shared = LIMITS[row["name"].split("/")[0]]
        assert 16 <= row["registers"] <= registers, row
        assert row["warps"] in warps, row
        assert row["shared"] <= shared, row
        assert row["name"] in done.stdout


def test_a_kernel_that_spills_is_a_failure(tmp_path):
    (tmp_path / "spilling.py").write_text(SPILLING)
    command = (*COMMAND, "--modules", "spilling", "--arch", "90")
    done = run(*command, "--json", str(tmp_path / "usage.json"), PYTHONPATH=str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    (row,) = json.loads((tmp_path / "usage.json").read_text())
    assert (row["registers"], row["warps"]) == (32, 1)
    assert row["spills"] >= 64  # 32 values or more go out and come back
    assert row["stack"] >= 128
    assert f"{row['spills']} spills, {row['stack']} B stack" in done.stdout
    assert "1 compiled, 1 at fault" in done.stdout


def test_half_values_are_stored_behind_a_barrier_that_follows_the_loads():
    done = run("-c", ORDER)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 4
    for name, codes in found.items():
        loop = codes[len(codes) - codes[::-1].index("LDG") :]  # behind the last load
        assert loop[:1] == ["BAR"], (name, codes)
        assert set(loop[1:]) == {"STG"}, (name, codes)


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        ({}, []),
        ({"registers": 65}, ["65 registers > 64"]),
        ({"shared": 257}, ["257 B shared > 256"]),
        ({"spills": 1}, ["1 spills"]),
        ({"stack": 8, "local": 16}, ["8 B stack", "16 B local"]),
        ({"name": "gradient/f32", "shared": 1}, ["1 B shared > 0"]),
        ({"name": "attend/bf16/128", "registers": 129}, ["129 registers > 128"]),
        ({"name": "attend/bf16/256", "registers": 168, "shared": 34816}, []),
        ({"name": "group_loss/sapo", "registers": 128, "shared": 1024}, []),
        ({"name": "group_loss/sapo", "registers": 129}, ["129 registers > 128"]),
    ],
)
def test_each_limit_is_a_fault_of_its_own(changes, faults):
    within = {"name": "softmax/bf16", "arch": 90, "warps": 16, "registers": 64, "shared": 256}
    usage = Usage(**{**within, "stack": 0, "local": 0, "spills": 0, **changes})
    assert usage.faults() == faults


def test_a_sample_is_spread_over_all():
    assert spread(list(range(10)), 3) == [0, 3, 6]
    assert spread(list(range(3)), 7) == spread(list(range(3)), None) == [0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--only", "sofmax"], {}, "no kernel's name begins with 'sofmax'"),
        ([], {"TRITON_INTERPRET": "1"}, "unset it"),
    ],
)
def test_nothing_compiled_is_no_success(arguments, environment, message):
    done = run(*COMMAND, *arguments, **environment)
    assert done.returncode == 2
    assert message in done.stderr

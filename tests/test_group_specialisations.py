"""How many kernels the group loss compiles: 10, whatever the batch and the options."""

import os
import subprocess
import sys
from pathlib import Path

# Runs where Triton compiles instead of interpreting: asks which kernel each launch would take.
COLLECT = """
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from grpo_engine.kernels import group_loss
from loss_cases import KLS, LOSSES, make_case, make_options, offsets, padded

kernel, kinds, launches = group_loss.group_loss_fwd_kernel, set(), 0
backend = make_backend(GPUTarget("cuda", 90, 32))
bind = create_function_from_signature(kernel.signature, kernel.params, backend)


def record(*args, grid, warmup, **kwargs):
    global launches
    _, specialisation, _ = bind(*args, **kwargs)
    kinds.add(str(specialisation))
    launches += 1


kernel.run = record
for loss, level in LOSSES:
    for kl in KLS:
        for n in (0, 1, 2, 15, 16, 17, 1024):
            credit = {"rewards": torch.zeros(2), "cu_groups": offsets([2])} if n % 2 else {}
            case = make_case(
                make_options(loss, level, kl, epsilon=1 / (n + 1), advantage_clip=n or None),
                lengths=[n, 1], drift=0.0, importance=n > 2, masked=n > 1,
                normalizer=[None, 16, torch.tensor(1.0)][n % 3],
                **credit or {"advantages": torch.zeros(2 if n < 16 or loss == "vespo" else n + 1)},
            )
            group_loss.grpo_loss(**case)
            group_loss.grpo_loss(**padded(case) | {"old_logp": None})
listed = {str(list(s[3].values())) for s in group_loss.specialisations() if s[3]}
print(launches, len(kinds), len(listed))
"""


def test_no_length_option_or_missing_tensor_compiles_another_kernel():
    tests = str(Path(__file__).parent)
    path = os.pathsep.join([tests, str(Path(tests).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", COLLECT],
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(13 * 7 * 7 * 2), "10", "10"]

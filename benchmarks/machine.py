"""The machine under a result: its own copy and GEMM rates, versions, commit."""

import platform
import subprocess
import time
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .harness import Timer, percentiles

PACKAGES = "grpo-engine torch triton trl liger-kernel transformers numpy".split()
COPY_BYTES = 512 << 20  # far beyond any cache
GEMM_SIZE = {"cpu": 2048, "cuda": 8192}
GEMM_DTYPES = (torch.float32, torch.bfloat16)


def describe(
    device: torch.device, small: bool = False, commit: str | None = None
) -> dict[str, Any]:
    """Versions, device and measured rates. `commit`: said by who knows it where git doesn't."""
    size = 64 if small else None
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or _commit(),
        "packages": {name: _version(name) for name in PACKAGES} | {"torch": torch.__version__},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device.type,
        "device_name": device_name(device),
        "threads": torch.get_num_threads(),
        "copy_gb_s": copy_rate(1 << 16 if small else COPY_BYTES, device),
        "gemm_gflop_s": {
            str(dtype).removeprefix("torch."): gemm_rate(dtype, device, size)
            for dtype in GEMM_DTYPES
        },
    }


def copy_rate(nbytes: int, device: torch.device) -> float:
    """GB/s of a copy that moves `nbytes` in all, half of them read and half written."""
    source = torch.ones(max(1, nbytes // 8), device=device)  # float32: 4 B read, 4 B written
    target = torch.empty_like(source)
    return nbytes / 1e6 / _median_ms(lambda: target.copy_(source), device)


def gemm_rate(dtype: torch.dtype, device: torch.device, size: int | None = None) -> float:
    """GFLOP/s of torch.mm of two square random matrices; 2 size^3 FLOP."""
    size = size or _affordable(dtype, device)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / 1e6 / _median_ms(lambda: a @ b, device)


def _affordable(dtype: torch.dtype, device: torch.device) -> int:
    """The size of matrices that are multiplied in a second: a CPU may be bad at a dtype."""
    tried, most = 256, GEMM_SIZE[device.type]
    if device.type == "cuda":
        return most
    a = torch.ones(tried, tried, dtype=dtype)
    begin = time.perf_counter()
    a @ a
    seconds = time.perf_counter() - begin
    return min(most, tried * max(1, int(seconds ** (-1 / 3))))


def device_name(device: torch.device) -> str:
    """The name of the processor that does the work."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _median_ms(step: Any, device: torch.device) -> float:
    step()
    return percentiles(Timer.on(device, rounds=7).rounds_ms({"": step})[""])[1]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    """The commit, with -dirty where files differ from it; without git the package's version."""
    unknown = f"version {_version('grpo-engine') or 'unknown'}"
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return unknown  # installed, maybe below somebody else's repository
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        run = subprocess.run(describe, cwd=root, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return unknown
    return run.stdout.strip() or unknown

"""The installation: versions, what was chosen for each op, workers of rewards, the disk."""

import importlib
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch
from torch.torch_version import TorchVersion

from ..errors import UserError
from ..rewards.load import load_rewards
from ..rewards.load_function import describe
from ..rewards.score import Scorer
from ..sample_config import RewardConfig
from .checks import FAIL, MISSING, OK, Check
from .ops import check_ops

# A requirement in the package's metadata: name, lower bound, extra.
REQUIREMENT = re.compile(r"([\w.-]+)(?:[^>;]*>=([\w.]+))?(?:.*extra == ['\"](\w+)['\"])?")
# Imported when they are there, and in no extra: why one would want them.
OTHERS = {"flash-attn": "decodes faster on CUDA from sm_80 on"}


def check_installation(folder: Path | None = None) -> list[Check]:
    """The whole installation on this machine; `folder`: to be written to, else the current one."""
    return [
        Check("python", OK, platform.python_version()),
        *_packages(),
        *_extension(),
        *_device(),
        _reward_worker(),
        _disk(folder or Path.cwd()),
    ]


def _packages() -> Iterator[Check]:
    """Those of the package's own metadata, with its bounds, and others that it uses."""
    try:
        required = metadata.requires("grpo-engine") or []
        yield Check("grpo-engine", OK, metadata.version("grpo-engine"))
    except metadata.PackageNotFoundError:
        yield Check("grpo-engine", MISSING, "not installed, so its needs are not known here")
        return
    for line in required:
        yield _package(*REQUIREMENT.match(line).groups())
    for name, use in OTHERS.items():
        version = _version(name)
        yield Check(name, MISSING if version is None else OK, version or f"{use}; optional")


def _package(name: str, least: str | None, extra: str | None) -> Check:
    version = torch.__version__ if name == "torch" else _version(name)
    bad = FAIL if extra is None else MISSING
    remedy = f"pip install -U 'grpo-engine{'' if extra is None else f'[{extra}]'}'"
    if version is None:
        return Check(name, bad, f"not installed: {remedy}")
    if least is not None and TorchVersion(version) < least:
        return Check(name, bad, f"{version} is below {least}: {remedy}")
    return Check(name, OK, version if extra is None else f"{version} (extra {extra})")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _extension() -> Iterator[Check]:
    try:
        extension = importlib.import_module("grpo_engine._C")
    except ImportError as error:
        yield Check("C++ extension", FAIL, f"{error}: build it with pip install -e .")
        return
    packed = extension.pack_groups(
        *(torch.tensor(x, dtype=torch.int32).numpy() for x in ([2, 3], [1, 4], [0, 1, 2])), 8, True
    )
    # 2 + 1 and 3 + 4 tokens are more than 8 together.
    right = sorted(packed) == [[(0, 0, 1)], [(1, 1, 2)]]
    isa = extension.best_isa()
    yield Check("C++ extension", OK if right else FAIL, f"instruction set {isa}")


def _device() -> Iterator[Check]:
    """The device that training would take, and what `auto` takes there for each op."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    yield Check("device", OK, f"{device.type} ({name}{threads})")
    yield from check_ops(device)


def _reward_worker() -> Check:
    """A killable process is started and asked for two rewards."""
    try:
        with Scorer(load_rewards([RewardConfig("exact", isolate=True)])) as scorer:
            given = {"prompts": ["?"] * 2, "completions": ["7", "8"], "completion_ids": [[1], [1]]}
            values = scorer.score(given, {"answer": ["7", "7"]}).components["exact"]
    except (UserError, OSError) as error:
        return Check("reward worker", FAIL, describe(error))
    if values != [1.0, 0.0]:
        return Check("reward worker", FAIL, f"returned {values}, not [1.0, 0.0]")
    return Check("reward worker", OK, "started, asked and ended")


def _disk(folder: Path) -> Check:
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Check("disk", FAIL, f"{folder} can't be written to: {error.strerror}")
    return Check("disk", OK, f"{folder} can be written to, {free / 2**30:.1f} GiB free")

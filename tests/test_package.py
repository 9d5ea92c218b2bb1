"""What is installed: wheel and sdist hold the package, and no top-level `kernels`."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROBE = (
    "import grpo_engine as ge, grpo_engine.kernels.reference as r, torch;"
    "print(ge.__file__); print(r.__file__);"
    "print(ge.pack_groups([2, 3], [1, 4], [0, 1, 2], 8))"
)


def run(*command: str, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def build_wheel(source: Path, out: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    run(*pip, "-w", str(out), str(source), cwd=out)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, so that building leaves nothing in it."""
    copy = tmp_path_factory.mktemp("source") / "tree"
    skip = shutil.ignore_patterns(".git", ".venv", "build", "runs", "*.so", "*.egg-info", ".*cache")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=skip)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(source, tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_the_package_and_nothing_else_at_the_top(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"grpo_engine"}
    assert "grpo_engine/kernels/reference.py" in names
    assert any(name.startswith("grpo_engine/_C.") for name in names)


def test_the_installed_wheel_runs(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    out = run(sys.executable, "-c", PROBE, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    package, kernels, packed = out.splitlines()
    assert package.startswith(str(tmp_path)) and kernels.startswith(str(tmp_path))
    # 7 and 3 tokens don't fit into 8 together.
    assert packed == "[[(1, 1, 2)], [(0, 0, 1)]]"


def test_a_wheel_can_be_built_from_the_sdist(source, tmp_path):
    backend = "from setuptools import build_meta; print(build_meta.build_sdist('dist'))"
    name = run(sys.executable, "-c", backend, cwd=source).splitlines()[-1]
    with tarfile.open(source / "dist" / name) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = next(tmp_path.glob("grpo_engine-*"))
    assert (unpacked / "csrc" / "pack.cpp").is_file()
    out = tmp_path / "wheel"
    out.mkdir()
    names = zipfile.ZipFile(build_wheel(unpacked, out)).namelist()
    assert "grpo_engine/kernels/reference.py" in names


def test_the_checkout_runs_as_it_is_installed(tmp_path):
    package, kernels, _ = run(sys.executable, "-c", PROBE, cwd=tmp_path).splitlines()
    assert Path(package).parent == ROOT / "grpo_engine"
    assert Path(kernels).resolve() == ROOT / "kernels" / "reference.py"


def test_the_folder_kernels_does_not_hide_the_package_of_that_name(tmp_path):
    other = tmp_path / "kernels"
    other.mkdir()
    (other / "__init__.py").write_text("WHO = 'the other one'\n")
    code = "import kernels; print(kernels.WHO)"
    assert "the other one" in run(sys.executable, "-c", code, cwd=ROOT, PYTHONPATH=str(tmp_path))

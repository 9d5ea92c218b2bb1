"""The C++ extension; everything else about the package is in pyproject.toml."""

from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

# OpenMP: torch's own threads, whose runtime is loaded first. Comparisons may be turned into selects
# (no traps are read), as vector code needs. GCC warns of its own header of intrinsics.
FLAGS = "-O3 -fopenmp -ffp-contract=fast -fno-trapping-math -Wno-psabi".split()
FLAGS.append("-Wno-maybe-uninitialized")

ParallelCompile(default=0).install()  # a compiler per core

setup(
    ext_modules=[
        Pybind11Extension(
            "grpo_engine._C",
            sorted(str(path) for path in Path("csrc").rglob("*.cpp")),
            depends=sorted(str(path) for path in Path("csrc").rglob("*.[hi]*")),
            cxx_std=17,
            extra_compile_args=FLAGS,
            extra_link_args=["-fopenmp"],
        )
    ]
)

"""The C++ extension; everything else about the package is in pyproject.toml."""

from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup

setup(
    ext_modules=[
        Pybind11Extension(
            "grpo_engine._C",
            sorted(str(path) for path in Path("csrc").glob("*.cpp")),
            depends=sorted(str(path) for path in Path("csrc").glob("*.hpp")),
            cxx_std=17,
            extra_compile_args=["-O3"],
        )
    ]
)

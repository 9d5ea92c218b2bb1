"""Compiles every copy of every Triton kernel, without a GPU, and reads what the machine code needs.

    python -m grpo_engine.benchmarks.cubins [--arch 80 90] [--only softmax/bf16] [--sample 6]

Exits with 1 if a copy spills, uses local memory or a stack, or passes its ceiling.
"""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ARCHITECTURES = (80, 86, 89, 90, 120)
MODULES = tuple(
    f"grpo_engine.kernels.{name}"
    for name in ("group_loss", "head_rows", "sampling", "group_attention", "flash_decode")
)
WARP = 32
ALIGNED = [["tt.divisibility", 16]]  # bytes; what a launch finds of every pointer that torch made


@dataclass(frozen=True)
class Ceiling:
    """The most that a copy of a kernel may use."""

    registers: int  # a thread
    shared: int  # bytes a program


# By the beginning of a name; the longest counts. Registers: four programs of 128 threads fit a
# multiprocessor with 128, two of 512 with 64. Shared memory: what joining the warps needs.
CEILINGS = {
    "": Ceiling(registers=128, shared=16384),
    "group_loss": Ceiling(registers=128, shared=1024),
    "group_advantages": Ceiling(registers=128, shared=1024),
    "softmax": Ceiling(registers=64, shared=256),
    "gradient": Ceiling(registers=64, shared=0),
    "sample": Ceiling(registers=64, shared=1024),
    # Two stages of keys and values: three programs or more fit the 100 KiB of sm_86, and two with a
    # head dim of 256, of which then three fit the registers of a multiprocessor.
    "attend": Ceiling(registers=128, shared=28 * 1024),
    "attend/bf16/256": Ceiling(registers=168, shared=34 * 1024),
    "attend/fp32/256": Ceiling(registers=80, shared=50 * 1024),
    "merge": Ceiling(registers=128, shared=1024),
    "append": Ceiling(registers=64, shared=0),
}


@dataclass(frozen=True)
class Usage:
    """What one copy of a kernel needs on one architecture."""

    name: str
    arch: int
    warps: int
    registers: int  # a thread
    stack: int  # bytes a thread
    local: int  # bytes a thread
    spills: int  # instructions that move a register to local memory or back
    shared: int  # bytes a program

    def faults(self) -> list[str]:
        """Why it may not stay so; empty if it may."""
        ceiling = CEILINGS[max((p for p in CEILINGS if self.name.startswith(p)), key=len)]
        forbidden = {"spills": self.spills, "B stack": self.stack, "B local": self.local}
        found = [f"{n} {what}" for what, n in forbidden.items() if n]
        if self.registers > ceiling.registers:
            found.append(f"{self.registers} registers > {ceiling.registers}")
        if self.shared > ceiling.shared:
            found.append(f"{self.shared} B shared > {ceiling.shared}")
        return found


def compile_copy(
    kernel: triton.JITFunction, signature: dict, constexprs: dict, options: dict, arch: int
) -> triton.compiler.CompiledKernel:
    """Machine code of one specialisation, as a launch would make it."""
    attributes = {
        (i,): ALIGNED
        for i, parameter in enumerate(kernel.params)
        if signature[parameter.name].startswith("*") and not parameter.do_not_specialize
    }
    source = ASTSource(kernel, signature, constexprs=constexprs, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, WARP), options=options)


def measure(name: str, arch: int, compiled: triton.compiler.CompiledKernel) -> Usage:
    """What it needs."""
    resources, instructions = read_cubin(compiled.asm["cubin"])
    return Usage(
        name=name,
        arch=arch,
        warps=compiled.metadata.num_warps,
        registers=resources["REG"],
        stack=resources["STACK"],
        local=resources["LOCAL"],
        spills=sum(code in ("LDL", "STL") for code in instructions),
        shared=compiled.metadata.shared,  # asked for at the launch, so the cubin doesn't say it
    )


def read_cubin(cubin: bytes) -> tuple[dict[str, int], list[str]]:
    """Resources (REG, STACK, LOCAL, ...) and the names of the instructions, without modifiers."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", "-sass", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (line,) = re.findall(r"^\s*REG:.*$", text, re.MULTILINE)
    resources = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line)}
    instructions = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9]*)", text)
    return resources, instructions


def specialisations(modules: list[str], only: str) -> list[tuple]:
    """Those of the modules whose name begins with `only`."""
    found = [s for name in modules for s in importlib.import_module(name).specialisations()]
    return [s for s in found if s[0].startswith(only)]


def spread(items: list, count: int | None) -> list:
    """`count` of the items, evenly from all of them."""
    if count is None or count >= len(items):
        return items
    return [items[i * len(items) // count] for i in range(count)]


def report(usages: Iterator[Usage]) -> list[Usage]:
    """Prints a line for each as it comes."""
    print(f"{'kernel':44} arch warps  regs stack local spills shared")
    done = []
    for u in usages:
        numbers = f"{u.registers:5} {u.stack:5} {u.local:5} {u.spills:6} {u.shared:6}"
        print(
            f"{u.name:44} {u.arch:4} {u.warps:5} {numbers}  {', '.join(u.faults())}".rstrip(),
            flush=True,
        )
        done.append(u)
    return done


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, nargs="+", default=ARCHITECTURES, help="90 is sm_90")
    parser.add_argument("--only", default="", help="names that begin so")
    parser.add_argument("--sample", type=int, help="so many copies, evenly from all")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--modules", nargs="+", default=MODULES, help="with specialisations()")
    chosen = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1: interpreted kernels can't be compiled; unset it")
    copies = specialisations(chosen.modules, chosen.only)
    if not copies:
        parser.error(f"no kernel's name begins with {chosen.only!r}")
    jobs = spread([(copy, arch) for copy in copies for arch in chosen.arch], chosen.sample)
    usages = report(measure(name, arch, compile_copy(*copy, arch)) for (name, *copy), arch in jobs)
    if chosen.json:
        rows = [asdict(u) | {"faults": u.faults()} for u in usages]
        chosen.json.write_text(json.dumps(rows, indent=1) + "\n")
    bad = sum(bool(u.faults()) for u in usages)
    print(f"{len(usages)} compiled, {bad} at fault")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())

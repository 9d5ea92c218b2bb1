"""The checks of benchmarks/device.py on the CPU."""

import torch

from grpo_engine.benchmarks.harness import Row, admit

CPU = torch.device("cpu")


def outcomes(module: object, impl: str) -> dict[str, Row]:
    cases = module.cases(impl, CPU, tiny=True)
    rows = [admit(c, c.providers[0], c.inputs(), c.expected())[0] for c in cases]
    assert len({row.case for row in rows}) == len(rows)
    return {row.case: row for row in rows}

"""What can be known before training: the installation, one group, the rewards, a pilot.

Every check takes plain values, a sampler or a scorer, and works without the trainer:
`installation.check_installation()`, `arithmetic.check_arithmetic(rules)`,
`policy.check_logprobs(...)`, `probes.probe(...)`, `pilot.figures(batch, ...)`.
"""

from .checks import FAIL, MISSING, OK, WARNING, Check, check_lines

__all__ = ["FAIL", "MISSING", "OK", "WARNING", "Check", "check_lines"]

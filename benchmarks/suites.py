"""The suites by the name that `grpo bench --suite` takes."""

from . import head_suite, loss_suite

SUITES = {"loss": loss_suite, "head": head_suite}

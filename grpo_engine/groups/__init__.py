"""The group as unit: states, signal, advantages, and the batch that the loss takes.

For another trainer: `make_batch(Samples(...), Rules(...))` gives states, advantages and masks of
groups that it sampled and scored; `check_groups` alone refuses groups of mixed conditions.
"""

from .batch import Batch, Origin, micro_batches
from .fingerprints import Fingerprint, check_groups
from .make import Samples, judge_samples, make_batch
from .preprocess import PercentileWindow
from .rules import Rules

__all__ = [
    "Batch",
    "Fingerprint",
    "Origin",
    "PercentileWindow",
    "Rules",
    "Samples",
    "check_groups",
    "judge_samples",
    "make_batch",
    "micro_batches",
]

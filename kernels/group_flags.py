"""Bits of the runtime integer `flags` of the group kernels.

An option that only changes numbers, or a tensor that is not given, compiles no other kernel.
A block is masked by a flag through `tl.where`: the interpreter's `&` of the two is no mask.
"""

import triton.language as tl

# Statistics
HAS_VALID = tl.constexpr(1 << 0)
BESSEL = tl.constexpr(1 << 1)
MEDIAN = tl.constexpr(1 << 2)
LEAVE_ONE_OUT = tl.constexpr(1 << 3)
BATCH_STD = tl.constexpr(1 << 4)
UNSCALED = tl.constexpr(1 << 5)
# Tensors of the loss
PADDED = tl.constexpr(1 << 6)
FROM_REWARDS = tl.constexpr(1 << 7)
PER_TOKEN = tl.constexpr(1 << 8)
HAS_OLD = tl.constexpr(1 << 9)
HAS_MASK = tl.constexpr(1 << 10)
HAS_IMPORTANCE = tl.constexpr(1 << 11)
HAS_IN_LOSS = tl.constexpr(1 << 12)
# Terms and reduction of the loss
RATIO_WEIGHTS_KL = tl.constexpr(1 << 13)
MEAN_OVER_TOKENS = tl.constexpr(1 << 14)
COUNT_TOKENS = tl.constexpr(1 << 15)
NORMALIZER_GIVEN = tl.constexpr(1 << 16)
NORMALIZER_IS_TENSOR = tl.constexpr(1 << 17)


def pack_flags(*chosen: tuple[tl.constexpr, bool]) -> int:
    """The sum of the bits that are on."""
    return sum(bit.value for bit, on in chosen if on)

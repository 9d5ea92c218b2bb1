"""The arithmetic of a softmax row: lanes that gather it online, and functions that keep digits.

A lane is (peak, mass, moment): the largest z it has seen, the sum of e^(z - peak) and the sum of
e^(z - peak) (z - peak), from which log-sum-exp and entropy follow.
"""

import triton
import triton.language as tl

FLOOR = tl.constexpr(-3.4028234663852886e38)  # a peak to start from: -inf - -inf is not a number
FAR = tl.constexpr(1e4)  # e^-FAR is 0, and FAR * 0 is not NaN


@triton.jit
def log1p(x):
    """For 0 <= x <= 1. The rounding of 1 + x cancels in the quotient."""
    u = 1 + x
    return tl.where(u == 1, x, tl.log(u) * x / tl.where(u == 1, 1.0, u - 1))


@triton.jit
def one_minus_exp(x):
    """For x <= 0. The rounding of e^x cancels in the quotient."""
    u = tl.exp(x)
    near = tl.where(u == 1, -x, (1 - u) * x / tl.where(u == 1, -1.0, tl.log(u)))
    return tl.where(u < 0.5, 1 - u, near)


@triton.jit
def tanh_and_slope(u):
    """tanh and its derivative; a series where 1 - e^(-2u) would cancel."""
    e = tl.exp(-2 * tl.abs(u))
    inverse = 1 / (1 + e)  # one division for both
    far = (1 - e) * inverse
    u2 = u * u
    near = u * (1 + u2 * (-1 / 3 + u2 * (2 / 15 - u2 * (17 / 315))))
    tanh = tl.where(tl.abs(u) < 0.2, near, tl.where(u < 0, -far, far))
    return tanh, 4 * e * inverse * inverse


@triton.jit
def empty_lanes(LANES: tl.constexpr):
    """LANES lanes that have seen nothing."""
    nothing = tl.zeros([LANES], tl.float32)
    return tl.full([LANES], FLOOR, tl.float32), nothing, nothing


@triton.jit
def add_to_lanes(peak, mass, moment, z):
    """z [LANES, n]: n more in every lane."""
    top = tl.maximum(peak, tl.max(z, 1))
    gap = tl.maximum(peak - top, -FAR)
    e = tl.exp(gap)
    moment, mass = (moment + gap * mass) * e, mass * e
    gap = tl.maximum(z - top[:, None], -FAR, propagate_nan=tl.PropagateNan.ALL)
    e = tl.exp(gap)
    return top, mass + tl.sum(e, 1), moment + tl.sum(e * gap, 1)


@triton.jit
def join_lanes(peak, mass, moment):
    """All lanes as one."""
    top = tl.max(peak, 0)
    gap = tl.maximum(peak - top, -FAR, propagate_nan=tl.PropagateNan.ALL)
    e = tl.exp(gap)
    return top, tl.sum(mass * e, 0), tl.sum((moment + gap * mass) * e, 0)


@triton.jit
def close_row(z_y, peak, mass, moment):
    """logp, entropy, 1 - p_y, and lse in two parts, from z_y and the other columns' sums.

    The target is kept out of the sums, so that 1 - p_y is as exact at p_y = 0.999999 as elsewhere.
    """
    log_mass = tl.log(mass)
    odds = (z_y - peak) - log_mass  # log(p_y / (1 - p_y))
    tail = log1p(tl.exp(-tl.abs(odds)))
    logp = tl.where(odds < 0, odds, 0.0) - tail
    logq = tl.where(odds > 0, -odds, 0.0) - tail
    p, q = tl.exp(logp), tl.exp(logq)
    entropy = -tl.where(p == 0, 0.0, p * logp)
    entropy += tl.where(q == 0, 0.0, q * (log_mass - moment / mass - logq))
    lse_peak = tl.where(odds > 0, z_y, peak)
    return logp, entropy, q, lse_peak, tl.where(odds > 0, tail, log_mass + tail)

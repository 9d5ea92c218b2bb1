"""Rewards of a group -> the advantage of one sample: device functions, and the op over them.

Every sample reads its own group's rewards (a few cached floats), so that no advantage has to be
in memory before the loss. Statistics are taken above the group's lowest reward and in units of
its spread: a constant added to the rewards costs no digit, and no square over- or underflows.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .group_flags import (
    BATCH_STD,
    BESSEL,
    HAS_VALID,
    LEAVE_ONE_OUT,
    MEDIAN,
    UNSCALED,
    pack_flags,
)
from .options import GRPOOptions

OFFSET_BLOCK = tl.constexpr(128)
GROUP_BLOCK = tl.constexpr(64)  # groups are 4 to 64 samples: one chunk
OTHERS_BLOCK = tl.constexpr(16)
BATCH_BLOCK = tl.constexpr(512)


@triton.jit
def _group_of(cu_groups_ptr, sample, n_samples, n_groups):
    """Group of a sample, its first sample and its end. Counting needs no chain of loads."""
    group, first, end = -1, 0, n_samples
    for start in range(0, n_groups + 1, OFFSET_BLOCK):
        i = start + tl.arange(0, OFFSET_BLOCK)
        offset = tl.load(cu_groups_ptr + i, mask=i <= n_groups, other=n_samples)
        before = (offset <= sample) & (i <= n_groups)
        group += tl.sum(before.to(tl.int32))
        first = tl.maximum(first, tl.max(tl.where(before, offset, 0)))
        end = tl.minimum(end, tl.min(tl.where(before, n_samples, offset)))
    return group, first, end


@triton.jit
def _rewards(rewards_ptr, valid_ptr, i, end, flags):
    """Rewards at `i`, and which of them enter a statistic."""
    inside = i < end
    has_valid = tl.where((flags & HAS_VALID) != 0, inside, False)
    reward = tl.load(rewards_ptr + i, mask=inside, other=0.0)
    valid = tl.load(valid_ptr + i, mask=has_valid, other=1) != 0
    return reward, inside & valid & (tl.abs(reward) < float("inf"))


@triton.jit
def _statistics(rewards_ptr, valid_ptr, first, end, flags, BLOCK: tl.constexpr):
    """Count, lowest, mean above the lowest, and std of the valid rewards."""
    count, low, high = 0, float("inf"), float("-inf")
    for start in range(first, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        reward, valid = _rewards(rewards_ptr, valid_ptr, i, end, flags)
        count += tl.sum(valid.to(tl.int32))
        low = tl.minimum(low, tl.min(tl.where(valid, reward, float("inf"))))
        high = tl.maximum(high, tl.max(tl.where(valid, reward, float("-inf"))))
    spread = tl.where(high > low, high - low, 1.0)
    total, squares = 0.0, 0.0
    for start in range(first, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        reward, valid = _rewards(rewards_ptr, valid_ptr, i, end, flags)
        total += tl.sum(tl.where(valid, (reward - low) / spread, 0.0))
    mean = total / tl.maximum(count, 1)
    for start in range(first, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        reward, valid = _rewards(rewards_ptr, valid_ptr, i, end, flags)
        deviation = tl.where(valid, (reward - low) / spread - mean, 0.0)
        squares += tl.sum(deviation * deviation)
    freedom = tl.where((flags & BESSEL) != 0, count - 1, count)
    std = tl.sqrt_rn(squares / tl.maximum(freedom, 1))
    return count, low, mean * spread, std * spread


@triton.jit
def _count(chosen):
    return tl.sum(chosen.to(tl.int32), axis=1)


@triton.jit
def _median(rewards_ptr, valid_ptr, first, end, count, low, flags, BLOCK: tl.constexpr):
    """Median of the valid rewards above the lowest: the reward that enough others lie below."""
    lower, upper = float("-inf"), float("-inf")
    for start in range(first, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        reward, valid = _rewards(rewards_ptr, valid_ptr, i, end, flags)
        less = tl.zeros([BLOCK], tl.int32)
        not_more = tl.zeros([BLOCK], tl.int32)
        for start_others in range(first, end, OTHERS_BLOCK):
            j = start_others + tl.arange(0, OTHERS_BLOCK)
            other, other_valid = _rewards(rewards_ptr, valid_ptr, j, end, flags)
            less += _count(other_valid[None, :] & (other[None, :] < reward[:, None]))
            not_more += _count(other_valid[None, :] & (other[None, :] <= reward[:, None]))
        at_lower = valid & (less <= (count - 1) // 2) & ((count - 1) // 2 < not_more)
        at_upper = valid & (less <= count // 2) & (count // 2 < not_more)
        lower = tl.maximum(lower, tl.max(tl.where(at_lower, reward, float("-inf"))))
        upper = tl.maximum(upper, tl.max(tl.where(at_upper, reward, float("-inf"))))
    return ((lower - low) + (upper - low)) / 2


@triton.jit
def sample_advantage(
    rewards_ptr, valid_ptr, cu_groups_ptr, sample, n_samples, n_groups, flags, statistics
):  # fmt: skip
    """Advantage and validity of a sample; its group, whether it is the first in it, its signal."""
    epsilon_std, min_std, advantage_clip = statistics
    group, first, end = _group_of(cu_groups_ptr, sample, n_samples, n_groups)
    count, low, baseline, std = _statistics(rewards_ptr, valid_ptr, first, end, flags, GROUP_BLOCK)
    # Taken above the lowest, equal rewards have a std of exactly 0; so has a single one.
    signal = std > min_std
    if (flags & MEDIAN) != 0:
        baseline = _median(rewards_ptr, valid_ptr, first, end, count, low, flags, GROUP_BLOCK)
    if (flags & BATCH_STD) != 0:
        _, _, _, std = _statistics(rewards_ptr, valid_ptr, 0, n_samples, flags, BATCH_BLOCK)

    reward, valid = _rewards(rewards_ptr, valid_ptr, sample, n_samples, flags)
    advantage = (reward - low) - baseline
    # r - (sum - r) / (n - 1) = (r - mean) n / (n - 1)
    others = tl.maximum(count - 1, 1)
    advantage *= tl.where((flags & LEAVE_ONE_OUT) != 0, count / others, 1.0)
    advantage /= tl.where((flags & UNSCALED) != 0, 1.0, std + epsilon_std)
    advantage = tl.minimum(tl.maximum(advantage, -advantage_clip), advantage_clip)
    return tl.where(valid & signal, advantage, 0.0), valid, group, sample == first, signal


@triton.jit(do_not_specialize=[
    "rewards_ptr", "valid_ptr", "cu_groups_ptr", "advantages_ptr", "signal_ptr",
    "n_samples", "n_groups", "flags",
])  # fmt: skip
def group_advantages_kernel(
    rewards_ptr,  # [S] f32
    valid_ptr,  # [S] bool
    cu_groups_ptr,  # [P+1] i32
    advantages_ptr,  # [S] f32, written
    signal_ptr,  # [P] bool, written for groups that are not empty
    n_samples, n_groups, flags, epsilon_std, min_std, advantage_clip,
):  # fmt: skip
    sample = tl.program_id(0)
    advantage, _, group, is_first, signal = sample_advantage(
        rewards_ptr, valid_ptr, cu_groups_ptr, sample, n_samples, n_groups, flags,
        (epsilon_std, min_std, advantage_clip),
    )  # fmt: skip
    tl.store(advantages_ptr + sample, advantage)
    tl.store(signal_ptr + group, signal, mask=is_first)


def statistics_flags(options: GRPOOptions, valid: Tensor | None) -> int:
    """The bits of `flags` that `sample_advantage` reads."""
    return pack_flags(
        (HAS_VALID, valid is not None),
        (BESSEL, options.ddof == 1),
        (MEDIAN, options.baseline == "median"),
        (LEAVE_ONE_OUT, options.baseline == "loo"),
        (BATCH_STD, options.scale_rewards == "batch"),
        (UNSCALED, options.scale_rewards == "none"),
    )


def statistics_limits(options: GRPOOptions) -> tuple[float, float, float]:
    """epsilon_std, min_std and advantage_clip as the kernels take them."""
    clip = math.inf if options.advantage_clip is None else options.advantage_clip
    return float(options.epsilon_std), float(options.min_std), float(clip)


def group_advantages(
    rewards: Tensor, cu_groups: Tensor, valid: Tensor | None, options: GRPOOptions
) -> tuple[Tensor, Tensor]:
    """Advantages relative to the group (DeepSeekMath, section 4.1), one program per sample.

    rewards: [S] f32; cu_groups: [P+1] i32, sample offsets of the groups; valid: [S] bool.
    Returns advantages [S] f32 and signal [P] bool.
    Reference: kernels/reference.py::group_advantages.
    """
    assert rewards.dtype == torch.float32 and cu_groups.dtype == torch.int32
    rewards, cu_groups = rewards.contiguous(), cu_groups.contiguous()
    flags = statistics_flags(options, valid)
    valid = rewards.view(torch.bool) if valid is None else valid.contiguous()
    advantages = torch.empty_like(rewards)
    signal = torch.zeros(len(cu_groups) - 1, dtype=torch.bool, device=rewards.device)
    if not len(rewards):
        return advantages, signal
    with torch.cuda.device_of(rewards):
        group_advantages_kernel[(len(rewards),)](
            rewards, valid, cu_groups, advantages, signal, len(rewards), len(signal), flags,
            *statistics_limits(options), num_warps=1,
        )  # fmt: skip
    return advantages, signal

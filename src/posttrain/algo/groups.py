"""Statistics of one group's rewards.

Shapes: G members of a group, invalid ones left out by the caller: statistics are over survivors.
"""

from __future__ import annotations

from torch import Tensor

ZERO_VARIANCE_STD = 1e-6  # below it a spread is float noise; dividing by it would blow it up


def is_zero_variance(rewards_G: Tensor, threshold: float = ZERO_VARIANCE_STD) -> bool:
    """Whether a group teaches nothing: an unbiased std below `threshold`, or a single member."""
    return bool(unbiased_std(rewards_G) < threshold)


def enough_survivors(num_survivors: int, group_size: int) -> bool:
    """Whether a group that lost members to failures still makes a baseline: n >= max(2, G/2).

    A group that was meant to have one member needs that one.
    """
    return num_survivors >= max(min(2, group_size), group_size / 2)


def above_lowest(rewards_G: Tensor) -> Tensor:
    """Rewards measured from the lowest, without gradient: equal rewards then give exactly 0, and
    a constant added to all of them costs no digits."""
    rewards_G = rewards_G.detach()
    return rewards_G - rewards_G.min() if len(rewards_G) else rewards_G


def centred(rewards_G: Tensor) -> Tensor:
    """R - mean, [G]."""
    above_lowest_G = above_lowest(rewards_G)
    return above_lowest_G - above_lowest_G.mean() if len(rewards_G) else above_lowest_G


def unbiased_std(rewards_G: Tensor) -> Tensor:
    """Standard deviation with N-1; 0 for fewer than two."""
    if len(rewards_G) < 2:
        return rewards_G.new_zeros(())
    return above_lowest(rewards_G).std(correction=1)

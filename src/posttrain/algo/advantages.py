"""Advantages of one group, or of a batch of groups, from outcome rewards.

Shapes: G members of a group. Every function takes whole groups, before any split into
micro-batches or ranks, in float32 or float64, and returns the same dtype, without gradient.
Members whose verdict is invalid are left out by the caller: statistics are over the survivors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

ZERO_VARIANCE_STD = 1e-6  # below it a spread is float noise; dividing by it would blow it up


def leave_one_out(rewards_G: Tensor) -> Tensor:
    """A_i = R_i - mean of the other G-1 rewards. Source: arXiv:2402.14740 (RLOO).

    Unbiased for the gradient of E[R]. A single member has nothing to be compared with: 0.

    Example:
        >>> leave_one_out(torch.tensor([1.0, 0.0, 0.0])).tolist()
        [1.0, -0.5, -0.5]
    """
    size = len(rewards_G)
    if size < 2:
        return torch.zeros_like(rewards_G)
    above_lowest_G = _above_lowest(rewards_G)
    return above_lowest_G - (above_lowest_G.sum() - above_lowest_G) / (size - 1)


def grpo(
    rewards_G: Tensor,
    *,
    std: Literal["group", "none"] = "group",
    eps: float = 1e-6,
    threshold: float = ZERO_VARIANCE_STD,
) -> Tensor:
    """A_i = (R_i - mean) / (std + eps), or without the division. std is unbiased (N-1).

    Sources: arXiv:2402.03300 section 4.1.2 ("group"), arXiv:2503.20783 section 3.2 ("none").
    With "group", a std below `threshold` gives 0 everywhere; a single member gets 0.
    """
    centred_G = _centred(rewards_G)
    if std == "none":
        return centred_G
    return _divided(centred_G, _std(rewards_G), eps, threshold)


def grpo_batch(
    groups: Sequence[Tensor], *, eps: float = 1e-6, threshold: float = ZERO_VARIANCE_STD
) -> list[Tensor]:
    """Group mean, batch standard deviation: A_i = (R_i - mean_g) / (std of all rewards + eps).

    The std is unbiased and over the raw rewards of all the groups, those without variance
    included, as in TRL `scale_rewards="batch"`: it therefore also holds the spread between tasks.
    """
    if not groups:
        return []
    batch_std = _std(torch.cat(list(groups)))
    return [_divided(_centred(rewards_G), batch_std, eps, threshold) for rewards_G in groups]


def is_zero_variance(rewards_G: Tensor, threshold: float = ZERO_VARIANCE_STD) -> bool:
    """Whether a group teaches nothing: an unbiased std below `threshold`, or a single member."""
    return bool(_std(rewards_G) < threshold)


def enough_survivors(num_survivors: int, group_size: int) -> bool:
    """Whether a group that lost members to failures still makes a baseline: n >= max(2, G/2)."""
    return num_survivors >= max(2, group_size / 2)


def _above_lowest(rewards_G: Tensor) -> Tensor:
    # Everything is measured from the lowest reward: equal rewards then give exactly 0, and
    # a constant added to all of them costs no digits.
    rewards_G = rewards_G.detach()
    return rewards_G - rewards_G.min() if len(rewards_G) else rewards_G


def _centred(rewards_G: Tensor) -> Tensor:
    above_lowest_G = _above_lowest(rewards_G)
    return above_lowest_G - above_lowest_G.mean() if len(rewards_G) else above_lowest_G


def _std(rewards_G: Tensor) -> Tensor:
    if len(rewards_G) < 2:
        return rewards_G.new_zeros(())
    return _above_lowest(rewards_G).std(correction=1)


def _divided(centred_G: Tensor, std: Tensor, eps: float, threshold: float) -> Tensor:
    if bool(std < threshold):
        return torch.zeros_like(centred_G)
    return centred_G / (std + eps)

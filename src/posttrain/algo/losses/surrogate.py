"""The pessimistic clip that PPO and the sequence losses share."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algo.losses.terms import LossTerms


def clipped_surrogate(
    ratio_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float
) -> LossTerms:
    """max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high)). Source: arXiv:1707.06347 eq. 7.

    A token is clipped where the second is strictly larger: its gradient is 0 there.
    """
    unclipped_N = -advantages_N * ratio_N
    clipped_N = -advantages_N * ratio_N.clamp(1 - clip_low, 1 + clip_high)
    is_clipped_N = clipped_N > unclipped_N
    return LossTerms(
        torch.maximum(unclipped_N, clipped_N),
        clipped_low_N=is_clipped_N & (advantages_N < 0),
        clipped_high_N=is_clipped_N & (advantages_N > 0),
    )

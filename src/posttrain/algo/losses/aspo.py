"""PPO with the reciprocal ratio as the weight of good tokens. Experimental."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algo.losses.terms import LossTerms
from posttrain.algo.ratios import log_ratio


def aspo(
    policy_logprobs_N: Tensor,
    prox_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    cap: float,
) -> LossTerms:
    """Gradient -A min(v, cap), v = 1 / ratio for A > 0 and ratio otherwise; 0 where PPO clips.

    Source: arXiv:2510.06062. The reciprocal gives a good token that the policy neglects more weight
    instead of less. PPO's bounds stay: no gradient above 1 + clip_high for A > 0 or below
    1 - clip_low for A < 0. The cap (soft dual clip) holds the weight and keeps the gradient.
    """
    ratio_N = log_ratio(policy_logprobs_N, prox_logprobs_N).exp()
    is_positive_N = advantages_N > 0
    bounded_N = torch.where(
        is_positive_N, ratio_N.clamp(max=1 + clip_high), ratio_N.clamp(min=1 - clip_low)
    )
    weight_N = torch.where(is_positive_N, 1 / bounded_N, bounded_N).detach()
    is_one_N = bounded_N / bounded_N.detach()  # 1, with a gradient inside the bounds
    is_capped_N = (weight_N > cap) & (advantages_N != 0)
    return LossTerms(
        -advantages_N * weight_N.clamp(max=cap) * is_one_N,
        clipped_low_N=(advantages_N < 0) & (ratio_N < 1 - clip_low),
        clipped_high_N=is_positive_N & (ratio_N > 1 + clip_high) | is_capped_N,
    )

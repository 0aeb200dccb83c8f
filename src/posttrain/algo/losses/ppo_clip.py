"""PPO's clipped surrogate, with unequal bounds and the dual clip."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algo.losses.surrogate import clipped_surrogate
from posttrain.algo.losses.terms import LossTerms
from posttrain.algo.ratios import log_ratio


def ppo_clip(
    policy_logprobs_N: Tensor,
    prox_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> LossTerms:
    """max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high)), at most -A dual_clip for A < 0.

    Sources: arXiv:1707.06347 eq. 7; unequal bounds, arXiv:2503.14476 eq. 10; dual clip,
    arXiv:1912.09729 eq. 5. On-policy the ratio is exactly 1: the value is -A, and the gradient is
    that of -A * policy_logprobs.
    """
    ratio_N = log_ratio(policy_logprobs_N, prox_logprobs_N).exp()
    terms = clipped_surrogate(ratio_N, advantages_N, clip_low, clip_high)
    if dual_clip is None:
        return terms
    assert terms.clipped_high_N is not None
    too_far_N = (advantages_N < 0) & (ratio_N > dual_clip)
    return LossTerms(
        torch.where(too_far_N, -advantages_N * dual_clip, terms.per_token_N),
        clipped_low_N=terms.clipped_low_N,
        clipped_high_N=terms.clipped_high_N | too_far_N,
    )

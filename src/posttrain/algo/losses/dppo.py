"""A trust region on probabilities instead of ratios."""

from __future__ import annotations

from torch import Tensor

from posttrain.algo.losses.terms import LossTerms
from posttrain.algo.ratios import log_ratio


def dppo(
    policy_logprobs_N: Tensor,
    sampler_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    mask_low: float,
    mask_high: float,
    kl_tau: float,
) -> LossTerms:
    """-A ratio, dropped outside the region, + kl_tau (policy - sampler)^2, ratio = policy/sampler.

    Source: arXiv:2602.04879, binary total variation. A token is dropped where its probability moved
    the way its advantage pushes by more than mask_high (up, A > 0) or mask_low (down, A < 0). Rare
    tokens keep learning: ratio 4 from .05 is a move of .15. The quadratic term stays on dropped
    tokens and pulls them back; it is not clamped, or it would let go where the drift is largest.
    """
    move_N = policy_logprobs_N.exp() - sampler_logprobs_N.exp()
    is_high_N = (advantages_N > 0) & (move_N > mask_high)
    is_low_N = (advantages_N < 0) & (move_N < -mask_low)
    surrogate_N = -advantages_N * log_ratio(policy_logprobs_N, sampler_logprobs_N).exp()
    penalty_N = kl_tau * (policy_logprobs_N - sampler_logprobs_N).square()
    kept_N = surrogate_N.masked_fill(is_high_N | is_low_N, 0)
    return LossTerms(kept_N + penalty_N, is_low_N, is_high_N)

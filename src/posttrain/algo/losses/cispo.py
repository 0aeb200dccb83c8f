"""Policy gradient whose importance weight is capped but never dropped."""

from __future__ import annotations

from torch import Tensor

from posttrain.algo.losses.terms import LossTerms
from posttrain.algo.ratios import log_ratio


def cispo(
    policy_logprobs_N: Tensor,
    prox_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    cap: float,
) -> LossTerms:
    """-sg(min(ratio, cap)) A policy_logprobs. Source: arXiv:2506.13585 eq. 4-5.

    `cap` is absolute (1 + eps_high of the paper) and there's no lower bound. Every token keeps a
    gradient, -min(ratio, cap) A; the value of the loss says nothing.
    """
    ratio_N = log_ratio(policy_logprobs_N, prox_logprobs_N).detach().exp()
    return LossTerms(
        -ratio_N.clamp(max=cap) * advantages_N * policy_logprobs_N,
        clipped_high_N=(ratio_N > cap) & (advantages_N != 0),
    )

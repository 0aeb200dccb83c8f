"""Positive trajectories as supervised examples, negative ones with a truncated weight."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algo.losses.terms import LossTerms
from posttrain.algo.ratios import MAX_LOG_RATIO, log_ratio
from posttrain.algo.segments import segment_sum


def topr(
    policy_logprobs_N: Tensor,
    sampler_logprobs_N: Tensor,
    advantages_N: Tensor,
    sequence_index_N: Tensor,
) -> LossTerms:
    """-A policy_logprobs where A >= 0; -sg(min(w, 1)) A policy_logprobs where A < 0.

    Source: arXiv:2503.14286 eq. 8. w is the product of policy / sampler over the sequence, its log
    clamped to +-20. The sign of the advantage decides, and a baseline moves it: with raw rewards
    of -1 and 1 it's the paper's. A bad answer that the policy has left behind stops pushing.
    """
    log_ratio_N = log_ratio(policy_logprobs_N, sampler_logprobs_N).detach()
    log_product_S = segment_sum(log_ratio_N, sequence_index_N)
    product_N = log_product_S.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()[sequence_index_N]
    is_negative_N = advantages_N < 0
    weight_N = torch.where(is_negative_N, product_N.clamp(max=1), 1.0)
    return LossTerms(
        -weight_N * advantages_N * policy_logprobs_N,
        clipped_high_N=is_negative_N & (product_N > 1),
    )

"""A soft weight on the product of a sequence's ratios. Experimental."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algo.losses.terms import LossTerms
from posttrain.algo.ratios import MAX_LOG_RATIO, log_ratio
from posttrain.algo.segments import segment_sum


def vespo(
    policy_logprobs_N: Tensor,
    sampler_logprobs_N: Tensor,
    advantages_N: Tensor,
    sequence_index_N: Tensor,
    *,
    k_pos: float,
    lambda_pos: float,
    k_neg: float,
    lambda_neg: float,
) -> LossTerms:
    """-sg(phi(w)) A policy_logprobs, phi(w) = w^k exp(lambda (1 - w)), (k, lambda) by A's sign.

    Source: arXiv:2602.10693. w is the product of policy / sampler over the sequence, its log
    clamped to +-20. phi(1) = 1, its maximum is at k / lambda, and it goes to 0 on both sides, so a
    sequence that drifted far has next to no weight. A = 0 counts as positive.
    """
    log_ratio_N = log_ratio(policy_logprobs_N, sampler_logprobs_N).detach()
    log_product_S = segment_sum(log_ratio_N, sequence_index_N)
    log_w_N = log_product_S.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[sequence_index_N]
    is_negative_N = advantages_N < 0
    k_N = torch.where(is_negative_N, log_w_N.new_tensor(k_neg), k_pos)
    lambda_N = torch.where(is_negative_N, log_w_N.new_tensor(lambda_neg), lambda_pos)
    phi_N = (k_N * log_w_N - lambda_N * torch.expm1(log_w_N)).exp()
    return LossTerms(-phi_N * advantages_N * policy_logprobs_N)

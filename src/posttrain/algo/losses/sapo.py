"""A sigmoid gate in place of the clip."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algo.losses.terms import LossTerms
from posttrain.algo.ratios import log_ratio


def sapo(
    policy_logprobs_N: Tensor,
    prox_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    tau_pos: float,
    tau_neg: float,
) -> LossTerms:
    """-(4 / tau) sigmoid(tau (ratio - 1)) A, tau = tau_pos for A > 0 and tau_neg otherwise.

    Source: arXiv:2511.20347 eq. 5-6. The gate's slope is 1 at ratio 1 and falls off smoothly on
    both sides, faster for a larger tau. On-policy the value is -2 A / tau and the gradient that of
    -A * policy_logprobs. Nothing is clipped.
    """
    ratio_N = log_ratio(policy_logprobs_N, prox_logprobs_N).exp()
    tau_N = torch.where(advantages_N > 0, ratio_N.new_tensor(tau_pos), tau_neg)
    return LossTerms(-(4 / tau_N) * torch.sigmoid(tau_N * (ratio_N - 1)) * advantages_N)

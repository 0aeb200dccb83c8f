"""Kahneman-Tversky optimisation: single answers, each desirable or not.

Shapes: S answers; M answers of which the baseline is made.
"""

from __future__ import annotations

import torch
from torch import Tensor


def kto(
    policy_sum_S: Tensor,
    ref_sum_S: Tensor,
    desirable_S: Tensor,
    kl_baseline: Tensor,
    *,
    beta: float,
    desirable_coef: float,
    undesirable_coef: float,
) -> Tensor:
    """coef * (1 - sigmoid(+-beta (policy - ref - z))): + for desirable answers, - for others, [S].

    Source: arXiv:2402.01306 (its constant lambda_y included). z is `kl_baseline`, a scalar
    without gradient. 1/2 coef where policy = reference and z = 0.
    """
    surplus_S = beta * (policy_sum_S - ref_sum_S - kl_baseline.detach())
    return torch.where(
        desirable_S,
        desirable_coef * (-surplus_S).sigmoid(),
        undesirable_coef * surplus_S.sigmoid(),
    )


def kto_kl_baseline(policy_sum_M: Tensor, ref_sum_M: Tensor) -> Tensor:
    """z = max(0, mean of policy - ref) over M answers, without gradient. 0 without answers.

    Source: arXiv:2402.01306, an estimate of KL(policy || reference); there the answers are put to
    other prompts, which is biased, and over the policy's own samples it is that KL's mean. The mean
    is over the whole batch, of all ranks.
    """
    log_ratio_M = (policy_sum_M - ref_sum_M).detach()
    return (log_ratio_M.sum() / max(1, len(log_ratio_M))).clamp_min(0)

"""DPO made unbiased under labels that are flipped at random."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from posttrain.algo.preferences.pairs import log_ratio_margin


def robust_dpo(
    policy_chosen_P: Tensor,
    policy_rejected_P: Tensor,
    ref_chosen_P: Tensor,
    ref_rejected_P: Tensor,
    *,
    beta: float,
    flip_rate: float,
) -> Tensor:
    """((1 - e) L(h) - e L(-h)) / (1 - 2e), L(h) = -log sigmoid(beta h), e = flip_rate < 1/2, [P].

    Source: arXiv:2403.00409. Its mean over labels flipped with chance e is DPO's loss on the
    true ones. A single pair's loss can be negative and has no lower bound.
    """
    margin_P = beta * log_ratio_margin(
        policy_chosen_P, policy_rejected_P, ref_chosen_P, ref_rejected_P
    )
    as_labelled_P, flipped_P = -logsigmoid(margin_P), -logsigmoid(-margin_P)
    return ((1 - flip_rate) * as_labelled_P - flip_rate * flipped_P) / (1 - 2 * flip_rate)

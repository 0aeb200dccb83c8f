"""Anchored preference optimisation, for answers that are worse than the policy's."""

from __future__ import annotations

from torch import Tensor


def apo_down(
    policy_chosen_P: Tensor,
    policy_rejected_P: Tensor,
    ref_chosen_P: Tensor,
    ref_rejected_P: Tensor,
    *,
    beta: float,
) -> Tensor:
    """sigmoid(beta c) + sigmoid(-beta (c - r)), c and r the log-ratios to the reference, [P].

    Source: arXiv:2408.06266: the chosen goes down, the rejected further down. 1 where
    policy = reference.
    """
    chosen_P, rejected_P = policy_chosen_P - ref_chosen_P, policy_rejected_P - ref_rejected_P
    return (beta * chosen_P).sigmoid() + (-beta * (chosen_P - rejected_P)).sigmoid()

"""Anchored preference optimisation, for answers that are better than the policy's."""

from __future__ import annotations

from torch import Tensor


def apo_zero(
    policy_chosen_P: Tensor,
    policy_rejected_P: Tensor,
    ref_chosen_P: Tensor,
    ref_rejected_P: Tensor,
    *,
    beta: float,
) -> Tensor:
    """sigmoid(-beta (policy - ref of the chosen)) + sigmoid(beta (policy - ref of the rejected)).

    Source: arXiv:2408.06266, [P]: each side is pushed from its own anchor 0, the chosen up
    and the rejected down. 1 where policy = reference.
    """
    chosen_P, rejected_P = policy_chosen_P - ref_chosen_P, policy_rejected_P - ref_rejected_P
    return (-beta * chosen_P).sigmoid() + (beta * rejected_P).sigmoid()

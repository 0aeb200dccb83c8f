"""Identity preference optimisation: a margin to reach, not to grow without end."""

from __future__ import annotations

from torch import Tensor

from posttrain.algo.preferences.pairs import (
    log_ratio_margin,
    log_ratio_margin_per_token,
)


def ipo(
    policy_chosen_P: Tensor,
    policy_rejected_P: Tensor,
    ref_chosen_P: Tensor,
    ref_rejected_P: Tensor,
    chosen_lengths_P: Tensor,
    rejected_lengths_P: Tensor,
    *,
    beta: float,
    length_normalised: bool = False,
) -> Tensor:
    """(h - 1 / (2 beta))^2, h the log-ratio margin, [P]. beta is the paper's tau.

    Source: arXiv:2310.12036 eq. 17, with sums over tokens; `length_normalised` takes log-ratios
    per token. 1 / (4 beta^2) where policy = reference.
    """
    sides = (policy_chosen_P, policy_rejected_P, ref_chosen_P, ref_rejected_P)
    if length_normalised:
        margin_P = log_ratio_margin_per_token(*sides, chosen_lengths_P, rejected_lengths_P)
    else:
        margin_P = log_ratio_margin(*sides)
    return (margin_P - 1 / (2 * beta)).square()

"""Direct preference optimisation."""

from __future__ import annotations

from torch import Tensor

from posttrain.algo.preferences.pairs import (
    log_ratio_margin,
    log_ratio_margin_per_token,
    smoothed_logistic,
)


def dpo(
    policy_chosen_P: Tensor,
    policy_rejected_P: Tensor,
    ref_chosen_P: Tensor,
    ref_rejected_P: Tensor,
    chosen_lengths_P: Tensor,
    rejected_lengths_P: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    length_normalised: bool = False,
) -> Tensor:
    """-log sigmoid(beta h), h the log-ratio margin, [P]. log 2 where policy = reference.

    Sources: arXiv:2305.18290 eq. 7; `label_smoothing` e > 0 is cDPO
    (https://ericmitchell.ai/cdpo.pdf), least at sigmoid(beta h) = 1 - e; `length_normalised` takes
    h of log-ratios per token (Tulu 3, arXiv:2411.15124), with a beta 20 or more times larger.
    """
    sides = (policy_chosen_P, policy_rejected_P, ref_chosen_P, ref_rejected_P)
    if length_normalised:
        margin_P = log_ratio_margin_per_token(*sides, chosen_lengths_P, rejected_lengths_P)
    else:
        margin_P = log_ratio_margin(*sides)
    return smoothed_logistic(beta * margin_P, label_smoothing)

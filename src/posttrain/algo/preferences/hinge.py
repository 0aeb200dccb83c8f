"""Sequence likelihood calibration: a hinge on the log-ratio margin."""

from __future__ import annotations

from torch import Tensor

from posttrain.algo.preferences.pairs import log_ratio_margin


def hinge(
    policy_chosen_P: Tensor,
    policy_rejected_P: Tensor,
    ref_chosen_P: Tensor,
    ref_rejected_P: Tensor,
    *,
    beta: float,
) -> Tensor:
    """max(0, 1 - beta h), h the log-ratio margin, [P].

    Source: arXiv:2309.06657 (RSO, "hinge-norm"), which puts log-ratios to the reference where
    SLiC-HF (arXiv:2305.10425) has log-probs. No gradient beyond h = 1 / beta; 1 where policy =
    reference.
    """
    margin_P = log_ratio_margin(policy_chosen_P, policy_rejected_P, ref_chosen_P, ref_rejected_P)
    return (1 - beta * margin_P).clamp_min(0)

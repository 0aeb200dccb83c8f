"""Odds-ratio preference optimisation: imitation of the chosen, and odds against the rejected."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from posttrain.algo.preferences.pairs import per_token


def orpo(
    policy_chosen_P: Tensor,
    policy_rejected_P: Tensor,
    chosen_lengths_P: Tensor,
    rejected_lengths_P: Tensor,
    *,
    odds_coef: float,
) -> Tensor:
    """-m_c - odds_coef * log sigmoid(log odds(m_c) - log odds(m_r)), [P].

    m is the mean log-prob of a side's tokens, odds(m) = exp(m) / (1 - exp(m)). Source:
    arXiv:2403.07691 eq. 6 and 7 (odds_coef is its lambda). Needs no reference.
    """
    chosen_P = per_token(policy_chosen_P, chosen_lengths_P)
    rejected_P = per_token(policy_rejected_P, rejected_lengths_P)
    odds_ratio_P = log_odds(chosen_P) - log_odds(rejected_P)
    return -chosen_P - odds_coef * logsigmoid(odds_ratio_P)


def log_odds(log_p: Tensor) -> Tensor:
    """log(p / (1 - p)) of log p <= 0; p within one rounding step of 1 counts as that far from it.

    Example:
        >>> log_odds(torch.tensor([0.5]).log()).item()
        0.0
    """
    below_one = log_p.clamp_max(-torch.finfo(log_p.dtype).eps)
    return below_one - torch.log(-torch.expm1(below_one))

"""Reward models from pairs: P(chosen is better) = sigmoid(score chosen - score rejected).

Shapes: P pairs.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry(
    scores_chosen_P: Tensor,
    scores_rejected_P: Tensor,
    *,
    margin: float | Tensor = 0.0,
    centre_coef: float = 0.0,
) -> Tensor:
    """-log sigmoid(chosen - rejected - margin) + centre_coef (chosen + rejected)^2, [P].

    Sources: Bradley and Terry 1952; margin (a number or [P]), arXiv:2307.09288 eq. 2; centring,
    arXiv:2312.09244: scores are defined up to a constant, and the penalty picks mean 0.
    """
    likelihood_P = -logsigmoid(scores_chosen_P - scores_rejected_P - margin)
    return likelihood_P + centre_coef * (scores_chosen_P + scores_rejected_P).square()


def pair_accuracy(scores_chosen_P: Tensor, scores_rejected_P: Tensor) -> Tensor:
    """Share of pairs in the labelled order, a tie counting half; 1/2 without pairs."""
    gaps_P = scores_chosen_P - scores_rejected_P
    wins = (gaps_P > 0).sum() + (gaps_P == 0).sum() / 2
    return (wins / len(gaps_P) if len(gaps_P) else wins + 0.5).to(gaps_P.dtype)


def bayes_accuracy(score_gaps_P: Tensor) -> Tensor:
    """Mean of sigmoid(|gap|): the most that any model reaches on labels drawn from true scores."""
    return score_gaps_P.abs().sigmoid().mean()

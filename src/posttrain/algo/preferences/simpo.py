"""Simple preference optimisation: no reference, log-probs per token, a margin."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from posttrain.algo.preferences.pairs import per_token


def simpo(
    policy_chosen_P: Tensor,
    policy_rejected_P: Tensor,
    chosen_lengths_P: Tensor,
    rejected_lengths_P: Tensor,
    *,
    beta: float,
    gamma: float,
) -> Tensor:
    """-log sigmoid(beta (mean log-prob chosen - mean log-prob rejected) - gamma), [P].

    Source: arXiv:2405.14734 eq. 6. gamma is in units of the logit, not of log-probs.
    """
    chosen_P = per_token(policy_chosen_P, chosen_lengths_P)
    rejected_P = per_token(policy_rejected_P, rejected_lengths_P)
    return -logsigmoid(beta * (chosen_P - rejected_P) - gamma)

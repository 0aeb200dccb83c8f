"""Contrastive preference optimisation: DPO with a uniform reference, plus imitation."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from posttrain.algo.preferences.pairs import per_token


def cpo(
    policy_chosen_P: Tensor,
    policy_rejected_P: Tensor,
    chosen_lengths_P: Tensor,
    *,
    beta: float,
    nll_coef: float,
) -> Tensor:
    """-log sigmoid(beta (chosen - rejected)) - nll_coef * mean log-prob of the chosen, [P].

    Source: arXiv:2401.08417. The paper's imitation term is the sum over tokens; per token,
    as here and in TRL, it does not grow with the answer.
    """
    preference_P = -logsigmoid(beta * (policy_chosen_P - policy_rejected_P))
    return preference_P - nll_coef * per_token(policy_chosen_P, chosen_lengths_P)

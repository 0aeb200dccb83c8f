"""Generalised advantages from a critic, with a lambda of its own for the critic's targets."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from posttrain.algo.advantages.whitening import Variance, whiten
from posttrain.algo.segments import discounted_to_go, next_in_segment
from posttrain.algo.value import length_adaptive_lambda

Whitening = Variance | Literal["none"]


def generalised_advantages(
    rewards_N: Tensor,
    values_N: Tensor,
    index_N: Tensor,
    bootstrap_S: Tensor,
    gamma: float,
    lam: float | Tensor,
) -> Tensor:
    """A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t, [N].

    Source: arXiv:1506.02438 eq. 16. Steps are tokens or turns; observations aren't in the layout,
    so value and advantage carry over them. V after the last step of segment s is bootstrap_S[s].
    """
    next_values_N = next_in_segment(values_N, index_N, bootstrap_S)
    return discounted_to_go(rewards_N + gamma * next_values_N - values_N, index_N, gamma * lam)


def gae(
    rewards_N: Tensor,
    values_N: Tensor,
    trajectory_index_N: Tensor,
    bootstrap_S: Tensor,
    *,
    gamma: float,
    lam: float,
    length_alpha: float | None,
    whitening: Whitening,
) -> Tensor:
    """`generalised_advantages` of tokens, [N], then whitened over the batch.

    With `length_alpha` lambda is 1 - 1 / (length_alpha l) for a trajectory of l action tokens
    (VAPO, arXiv:2504.05118 eq. 8). `rewards_N` as for reinforce_pp; `bootstrap_S` is the value
    after the last token of a truncated trajectory, 0 where it ended by itself.
    """
    decay = lam
    if length_alpha is not None:
        lengths_S = torch.bincount(trajectory_index_N)
        lam_S = length_adaptive_lambda(lengths_S.to(values_N.dtype), length_alpha)
        decay = lam_S[trajectory_index_N]
    advantages_N = generalised_advantages(
        rewards_N, values_N, trajectory_index_N, bootstrap_S, gamma, decay
    )
    return advantages_N if whitening == "none" else whiten(advantages_N, whitening)


def gae_targets(
    rewards_N: Tensor,
    values_N: Tensor,
    trajectory_index_N: Tensor,
    bootstrap_S: Tensor,
    *,
    gamma: float,
    lam_critic: float,
) -> Tensor:
    """What the critic is fitted to: A(lam_critic) + V, [N], never whitened.

    lam_critic 1 is the Monte-Carlo return: no bias from the critic's own values (decoupled GAE,
    arXiv:2503.01491 section 4.2).
    """
    return values_N + generalised_advantages(
        rewards_N, values_N, trajectory_index_N, bootstrap_S, gamma, lam_critic
    )

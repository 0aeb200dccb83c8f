"""Generalised advantages over turns: one state, one value and one advantage for each turn."""

from __future__ import annotations

from torch import Tensor

from posttrain.algo.advantages.gae import Whitening, generalised_advantages
from posttrain.algo.advantages.whitening import whiten
from posttrain.algo.segments import is_last_of_segment, segment_sum


def turn_ppo(
    rewards_N: Tensor,
    values_N: Tensor,
    turn_index_N: Tensor,
    trajectory_index_N: Tensor,
    bootstrap_S: Tensor,
    *,
    gamma: float,
    lam: float,
    whitening: Whitening,
) -> Tensor:
    """A of its turn for every token, [N], then whitened over all tokens.

    Source: arXiv:2512.17008 (turn-level MDP). A turn's value is that at its first token, its
    reward the sum of `rewards_N` over it; discounts count turns. `rewards_N` as for reinforce_pp,
    `bootstrap_S` as for gae.
    """
    advantages_N = _of_turns(
        rewards_N, values_N, turn_index_N, trajectory_index_N, bootstrap_S, gamma, lam
    )[0]
    return advantages_N if whitening == "none" else whiten(advantages_N, whitening)


def turn_ppo_targets(
    rewards_N: Tensor,
    values_N: Tensor,
    turn_index_N: Tensor,
    trajectory_index_N: Tensor,
    bootstrap_S: Tensor,
    *,
    gamma: float,
    lam_critic: float,
) -> Tensor:
    """A(lam_critic) + V of its turn for every token, [N]; only a turn's first token needs it."""
    advantages_N, turn_values_N = _of_turns(
        rewards_N, values_N, turn_index_N, trajectory_index_N, bootstrap_S, gamma, lam_critic
    )
    return advantages_N + turn_values_N


def _of_turns(
    rewards_N: Tensor,
    values_N: Tensor,
    turn_index_N: Tensor,
    trajectory_index_N: Tensor,
    bootstrap_S: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Advantage and value of the turn that each token belongs to."""
    # Turns count from 0 in each trajectory: one ends where either number changes.
    is_last_N = is_last_of_segment(turn_index_N) | is_last_of_segment(trajectory_index_N)
    is_first_N = is_last_N.roll(1)
    turn_N = is_first_N.cumsum(0) - 1
    values_U = values_N[is_first_N]
    advantages_U = generalised_advantages(
        segment_sum(rewards_N, turn_N),
        values_U,
        trajectory_index_N[is_first_N],
        bootstrap_S,
        gamma,
        lam,
    )
    return advantages_U[turn_N], values_U[turn_N]

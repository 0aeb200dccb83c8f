"""Turns compared with turns of the group that began in the same state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from posttrain.algo.advantages.turns import by_member, return_to_go, with_outcome
from posttrain.algo.advantages.whitening import normalised
from posttrain.algo.groups import centred


def gigpo(
    rewards_G: Tensor,
    turn_rewards: Sequence[Tensor],
    turn_states: Sequence[Sequence[str]],
    *,
    gamma: float,
    omega: float,
    normalise: bool,
) -> list[Tensor]:
    """A_k = A^E + omega A^S_k, one tensor [K] a member. Source: arXiv:2505.10978 eq. 3-8 (GiGPO).

    A^E compares the sum of a member's rewards within the group; A^S compares the discounted return
    from turn k among all turns of the group that began in the same state, those of one trajectory
    included, which is what makes a loop expensive. Both are centred, and divided by their std
    (N-1) if `normalise`. The outcome arrives at the last turn. A state that came once gives 0.
    """
    relative = normalised if normalise else centred
    rewards = with_outcome(rewards_G, turn_rewards)
    returns_M = torch.cat([return_to_go(rewards_K, gamma) for rewards_K in rewards])
    anchors: dict[str, list[int]] = defaultdict(list)
    for m, state in enumerate(chain.from_iterable(turn_states)):
        anchors[state].append(m)
    of_turn_M = torch.zeros_like(returns_M)
    for turns in anchors.values():
        of_turn_M[turns] = relative(returns_M[turns])
    of_episode_G = relative(torch.stack([rewards_K.sum() for rewards_K in rewards]))
    return [
        of_episode + omega * of_turn_K
        for of_episode, of_turn_K in zip(of_episode_G, by_member(of_turn_M, rewards), strict=True)
    ]

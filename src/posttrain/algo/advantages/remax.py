"""The reward of the greedy answer as baseline."""

from __future__ import annotations

from torch import Tensor


def remax(rewards_G: Tensor, greedy_reward: Tensor | float) -> Tensor:
    """A_i = R_i - R(greedy). Source: arXiv:2310.10505 (ReMax).

    The greedy answer to the same task comes from the same weights as the samples. Defined for a
    single member; members that are equal to each other still differ from the greedy one.
    """
    return rewards_G.detach() - greedy_reward

"""Returns to go of single tokens, whitened over the batch."""

from __future__ import annotations

from torch import Tensor

from posttrain.algo.advantages.whitening import Variance, whiten
from posttrain.algo.segments import discounted_to_go


def reinforce_pp(
    rewards_N: Tensor, trajectory_index_N: Tensor, *, gamma: float, variance: Variance
) -> Tensor:
    """A = whiten(G), G_t = r_t + gamma G_{t+1} within the trajectory, over all tokens, [N].

    Source: arXiv:2501.03262 eq. 3 and 9 (REINFORCE++). `rewards_N` holds the outcome and turn
    rewards where they arrive, minus coef * k1 at every token if KL is in the reward. gamma counts
    action tokens, and rewards pass over observations. A batch of equal returns gives 0.
    """
    return whiten(discounted_to_go(rewards_N, trajectory_index_N, gamma), variance)

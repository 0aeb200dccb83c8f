"""No baseline."""

from __future__ import annotations

from torch import Tensor


def reinforce(rewards_G: Tensor) -> Tensor:
    """A_i = R_i. Source: REINFORCE, doi:10.1007/BF00992696.

    Keeps the sign of the reward, which TOPR (arXiv:2503.14286) reads. A constant added to all
    rewards changes the gradient's variance, and a single member gets its raw reward.
    """
    return rewards_G.detach()

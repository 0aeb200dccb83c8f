"""Leave-one-out baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algo.groups import above_lowest


def rloo(rewards_G: Tensor) -> Tensor:
    """A_i = R_i - mean of the other G-1 rewards. Source: arXiv:2402.14740 (RLOO).

    Unbiased for the gradient of E[R]. A single member has nothing to be compared with: 0.

    Example:
        >>> rloo(torch.tensor([1.0, 0.0, 0.0])).tolist()
        [1.0, -0.5, -0.5]
    """
    size = len(rewards_G)
    if size < 2:
        return torch.zeros_like(rewards_G)
    above_lowest_G = above_lowest(rewards_G)
    return above_lowest_G - (above_lowest_G.sum() - above_lowest_G) / (size - 1)

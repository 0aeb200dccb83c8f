"""Length-weighted mean as baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algo.groups import above_lowest


def opo(rewards_G: Tensor, lengths_G: Tensor) -> Tensor:
    """A_i = R_i - sum_j l_j R_j / sum_j l_j. Source: arXiv:2505.23585 (OPO), no std.

    The baseline of least variance if the squared score of a sequence grows with its length. A
    single member and equal rewards get 0; without any token the baseline is the lowest reward.
    """
    above_lowest_G = above_lowest(rewards_G)
    smallest = torch.finfo(rewards_G.dtype).tiny
    weights_G = lengths_G / lengths_G.sum().clamp_min(smallest)
    return above_lowest_G - (weights_G * above_lowest_G).sum()

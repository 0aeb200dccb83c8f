"""A reward for short answers within the group."""

from __future__ import annotations

import torch
from torch import Tensor


def kimi_length(lengths_G: Tensor, correct_G: Tensor, *, coef: float) -> Tensor:
    """coef * (1/2 - (L - shortest) / (longest - shortest)); for wrong answers at most 0.

    Source: arXiv:2501.12599 section 2.3.3 (Kimi k1.5). Equal lengths give 0.
    """
    if not len(lengths_G) or bool(lengths_G.min() == lengths_G.max()):
        return torch.zeros_like(lengths_G)
    above_shortest_G = lengths_G - lengths_G.min()
    score_G = 0.5 - above_shortest_G / above_shortest_G.max()
    return coef * torch.where(correct_G, score_G, score_G.clamp(max=0))

"""Credit for the best of the group alone."""

from __future__ import annotations

import torch
from torch import Tensor


def pass_at_k(rewards_G: Tensor) -> Tensor:
    """R_max - R_second for the best member, 0 for the others. Source: arXiv:2503.19595.

    Unbiased for the gradient of E[max of G]: the second is what the maximum would have been
    without the best. A tie for the best and a single member give 0 everywhere.
    """
    advantages_G = torch.zeros_like(rewards_G)
    if len(rewards_G) < 2:
        return advantages_G
    best_2, index_2 = rewards_G.topk(2)
    return advantages_G.index_add(0, index_2[:1], (best_2[0] - best_2[1])[None])

"""The outcome's advantage, smaller for earlier turns."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algo.advantages.rloo import rloo


def turn_discounted(rewards_G: Tensor, num_turns_G: Tensor, *, gamma: float) -> list[Tensor]:
    """A_k = gamma^(K-1-k) A_i for turns k = 0..K-1, A_i the leave-one-out advantage of the outcome.

    Counts turns, not tokens: a discount per token would punish long and useful turns. One tensor
    [K] a member; 0 where rloo gives 0.
    """
    steps_left = [torch.arange(count - 1, -1, -1) for count in num_turns_G.int().tolist()]
    pairs = zip(rloo(rewards_G), steps_left, strict=True)
    return [advantage * gamma ** left_K.to(rewards_G.dtype) for advantage, left_K in pairs]

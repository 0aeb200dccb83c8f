"""A reward by length in place of the outcome."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def cosine_length(
    outcomes_G: Tensor,
    lengths_G: Tensor,
    correct_G: Tensor,
    *,
    max_length: int,
    correct_short: float,
    correct_long: float,
    wrong_short: float,
    wrong_long: float,
    exceed: float,
) -> Tensor:
    """cosine - outcome: half a cosine from `_short` at length 0 to `_long` at max_length.

    Beyond max_length it is `exceed`, right or wrong. Source: arXiv:2502.03373 section 3 (CosFn).
    """
    shortness_G = (1 + torch.cos(math.pi * lengths_G / max_length)) / 2
    right_G = correct_long + (correct_short - correct_long) * shortness_G
    wrong_G = wrong_long + (wrong_short - wrong_long) * shortness_G
    cosine_G = torch.where(correct_G, right_G, wrong_G)
    return torch.where(lengths_G > max_length, exceed, cosine_G) - outcomes_G

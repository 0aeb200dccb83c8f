"""A penalty for long answers that grows with the group's pass rate."""

from __future__ import annotations

from torch import Tensor


def linear_length(lengths_G: Tensor, correct_G: Tensor, *, coef: float) -> Tensor:
    """-coef * pass rate * L / longest: brevity counts for as much as the task is solved.

    Source: prime-rl, `LinearLengthPenaltyConfig` (its term of output tokens).
    """
    if not len(lengths_G):
        return lengths_G
    pass_rate = correct_G.to(lengths_G).mean()
    return -coef * pass_rate * lengths_G / lengths_G.max().clamp_min(1)

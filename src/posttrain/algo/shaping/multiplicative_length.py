"""A discount of correct answers by their length."""

from __future__ import annotations

from torch import Tensor


def multiplicative_length(
    outcomes_G: Tensor, lengths_G: Tensor, correct_G: Tensor, *, gamma: float, reference_length: int
) -> Tensor:
    """outcome * (gamma^(L / reference_length) - 1) for correct answers, 0 for wrong ones: with the
    outcome it makes outcome * gamma^(L / reference_length)."""
    return correct_G * outcomes_G * (gamma ** (lengths_G / reference_length) - 1)

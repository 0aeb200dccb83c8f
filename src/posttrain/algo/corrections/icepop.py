"""Importance weights of tokens, 0 outside a band."""

from __future__ import annotations

from torch import Tensor


def icepop(log_mismatch_N: Tensor, *, low: float, high: float) -> Tensor:
    """w where low <= w <= high, else 0. Source: arXiv:2510.18855 (IcePop).

    What is dropped is dropped systematically: the expected gradient can change its sign.
    """
    weight_N = log_mismatch_N.exp()
    return weight_N * ((weight_N >= low) & (weight_N <= high))

"""A mask of tokens whose ratio is outside a band."""

from __future__ import annotations

from torch import Tensor


def token_mask(log_mismatch_N: Tensor, *, low: float, high: float) -> Tensor:
    """1 where low <= w <= high, else 0: drops without weighing. Source: `token_k1` rejection of
    verl's rollout_corr_helper.py."""
    weight_N = log_mismatch_N.exp()
    return ((weight_N >= low) & (weight_N <= high)).to(log_mismatch_N)

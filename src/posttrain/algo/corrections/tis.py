"""Truncated importance sampling of tokens."""

from __future__ import annotations

from torch import Tensor


def tis(log_mismatch_N: Tensor, *, cap: float, floor: float = 0.0) -> Tensor:
    """min(w, cap), and at least `floor`. Source: arXiv:2505.24298; TIS as in
    https://fengyao.notion.site/off-policy-rl."""
    return log_mismatch_N.exp().clamp(floor, cap)

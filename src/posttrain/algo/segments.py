"""Sums and scans over the segments (sequences, turns, groups) of a flat layout.

Shapes: N tokens end to end, S segments; index_N int64 says which segment a token belongs to. Tokens
of one segment are consecutive and in order of time. Only tokens that the policy chose are in the
layout: a scan passes over observations by itself, and a discount counts action tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def num_segments(index_N: Tensor) -> int:
    """One more than the largest index; 0 without tokens."""
    return int(index_N.max()) + 1 if len(index_N) else 0


def segment_sum(values_N: Tensor, index_N: Tensor) -> Tensor:
    """Sum of each segment, [S]. Differentiable."""
    return values_N.new_zeros(num_segments(index_N)).index_add(0, index_N, values_N)


def segment_mean(values_N: Tensor, index_N: Tensor) -> Tensor:
    """Mean of each segment, [S]; 0 for one without tokens. Differentiable."""
    counts_S = torch.bincount(index_N, minlength=num_segments(index_N))
    return segment_sum(values_N, index_N) / counts_S.clamp_min(1)


def discounted_to_go(values_N: Tensor, index_N: Tensor, decay: float | Tensor) -> Tensor:
    """Sum over the rest of the segment: y_t = x_t + decay_t * y_{t+1}, 0 after its last token.

    `decay` is a number, or [N] for a factor of each token. Without gradient.

    Example:
        >>> discounted_to_go(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0, 0, 1]), 0.5).tolist()
        [0.5, 1.0, 2.0]
    """
    if not len(values_N):
        return values_N.detach()
    padded_ST, mask_ST = _padded(values_N.detach(), index_N)
    decay_N = torch.as_tensor(decay, dtype=values_N.dtype).expand(len(values_N))
    decay_ST, _ = _padded(decay_N, index_N)
    carried_S = padded_ST.new_zeros(len(padded_ST))
    for t in range(padded_ST.shape[1] - 1, -1, -1):
        carried_S = padded_ST[:, t] + decay_ST[:, t] * carried_S
        padded_ST[:, t] = carried_S
    return padded_ST[mask_ST]


def next_in_segment(values_N: Tensor, index_N: Tensor, after_last: Tensor | float = 0.0) -> Tensor:
    """The value of the following token of the segment; `after_last` (a number or [S]) at its end.

    Example:
        >>> next_in_segment(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 0, 1]), 9.0).tolist()
        [2.0, 9.0, 9.0]
    """
    is_last_N = is_last_of_segment(index_N)
    shifted_N = torch.cat([values_N[1:], values_N[:1]])
    end_S = torch.as_tensor(after_last, dtype=values_N.dtype)
    end_N = end_S[index_N] if end_S.ndim else end_S.expand(len(values_N))
    return torch.where(is_last_N, end_N, shifted_N)


def is_last_of_segment(index_N: Tensor) -> Tensor:
    """True at the last token of each segment."""
    is_last_N = torch.ones_like(index_N, dtype=torch.bool)
    is_last_N[:-1] = index_N[1:] != index_N[:-1]
    return is_last_N


def _padded(values_N: Tensor, index_N: Tensor) -> tuple[Tensor, Tensor]:
    """Segments as rows of [S, T] and the mask of what is real; row-major order is that of [N]."""
    counts_S = torch.bincount(index_N)
    steps_T = torch.arange(int(counts_S.max()), device=counts_S.device)
    mask_ST = steps_T < counts_S[:, None]
    padded_ST = values_N.new_zeros(mask_ST.shape)
    padded_ST[mask_ST] = values_N
    return padded_ST, mask_ST

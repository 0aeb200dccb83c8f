"""A penalty for answers near the end of the budget."""

from __future__ import annotations

from torch import Tensor


def soft_overlong(lengths_G: Tensor, *, max_length: int, cache_length: int) -> Tensor:
    """0 up to max_length - cache_length tokens, then falling to -1 at max_length and beyond.

    Source: arXiv:2503.14476 eq. 13. `max_length` is the budget of sampled tokens.
    """
    return ((max_length - cache_length - lengths_G) / cache_length).clamp(-1, 0)

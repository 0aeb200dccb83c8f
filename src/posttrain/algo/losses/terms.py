"""What a loss returns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossTerms:
    """per_token_N: loss with gradient; clipped_low_N, clipped_high_N: bool, where a lower or an
    upper bound took hold: it cut a token's gradient to 0, or held its weight. Never where the
    advantage is 0: there is nothing to bound. None for a loss that has no such bound.

    Example:
        >>> import torch
        >>> LossTerms(torch.zeros(2)).clipped_low_N is None
        True
    """

    per_token_N: Tensor
    clipped_low_N: Tensor | None = None
    clipped_high_N: Tensor | None = None

"""A penalty for saying the same again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def repetition(token_ids: Sequence[Tensor], *, ngram: int, coef: float) -> Tensor:
    """-coef * (1 - distinct n-grams / n-grams) of each member, float64; 0 when shorter than one.

    Source: `get_repetition_penalty` of the code to arXiv:2502.03373 appendix C.2 (and of open-r1),
    over tokens where it counts words.

    Example:
        >>> repetition([torch.tensor([5, 6, 5, 6, 5])], ngram=2, coef=1.0).tolist()
        [-0.5]
    """
    repeated = [_repeated_frac(ids, ngram) for ids in token_ids]
    return -coef * torch.tensor(repeated, dtype=torch.float64)


def _repeated_frac(ids_L: Tensor, ngram: int) -> float:
    if len(ids_L) < ngram:
        return 0.0
    ngrams = ids_L.unfold(0, ngram, 1)
    return 1 - len(torch.unique(ngrams, dim=0)) / len(ngrams)

"""A mask of random tokens that make the entropy fall."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algo.covariance import covariance


def clip_cov(
    prox_logprobs_N: Tensor,
    advantages_N: Tensor,
    seed: int,
    *,
    frac: float,
    low: float,
    high: float,
) -> Tensor:
    """0 for `frac` of all tokens, at least one, drawn from those with low < covariance < high.

    Source: arXiv:2505.22617 eq. 10 (Clip-Cov). The draw is a function of `seed`.
    """
    covariance_N = covariance(prox_logprobs_N, advantages_N)
    candidates = ((covariance_N > low) & (covariance_N < high)).nonzero().squeeze(1)
    generator = torch.Generator().manual_seed(seed)
    count = max(1, int(frac * len(advantages_N)))
    chosen = candidates[torch.randperm(len(candidates), generator=generator)[:count]]
    return torch.ones_like(advantages_N).index_fill(0, chosen, 0.0)

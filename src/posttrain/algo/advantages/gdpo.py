"""Several rewards, each normalised before they are added."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posttrain.algo.advantages.whitening import spread
from posttrain.algo.groups import ZERO_VARIANCE_STD


def gdpo(
    terms_GR: Tensor,
    batch_terms: Sequence[Tensor],
    term_weights_R: Tensor,
    *,
    std_eps: float = 1e-6,
) -> Tensor:
    """A_i = S_i / (std_batch(S) + eps), S_i = sum_r w_r (x_ir - mean_r) / (std_r + eps).

    Source: arXiv:2601.05242 (GDPO); TRL `multi_objective_aggregation="normalize_then_sum"` is S.
    R reward terms before their weights w. Mean and std (N-1) of a term are those of its group;
    `batch_terms` has the terms of every group. A term without spread adds 0; a single member gets
    0.
    """
    summed_G = _sum_of_normalised([terms_GR], term_weights_R, std_eps)
    # S has mean 0 in every group, hence in the batch: there is nothing to subtract.
    deviation = spread(_sum_of_normalised(batch_terms, term_weights_R, std_eps))
    if bool(deviation < ZERO_VARIANCE_STD):
        return torch.zeros_like(summed_G)
    return summed_G / (deviation + std_eps)


def _sum_of_normalised(groups: Sequence[Tensor], weights_R: Tensor, eps: float) -> Tensor:
    """S of all members of all groups, end to end; one pass, because every group asks for it."""
    terms_BR = torch.cat(list(groups)).detach()
    sizes_P = torch.tensor([len(terms) for terms in groups], device=terms_BR.device)
    group_B = torch.arange(len(groups), device=terms_BR.device).repeat_interleave(sizes_P)
    zeros_PR = terms_BR.new_zeros(len(groups), terms_BR.shape[1])
    mean_PR = zeros_PR.index_add(0, group_B, terms_BR) / sizes_P[:, None].clamp_min(1)
    centred_BR = terms_BR - mean_PR[group_B]
    squares_PR = zeros_PR.index_add(0, group_B, centred_BR.square())
    std_BR = (squares_PR / (sizes_P[:, None] - 1).clamp_min(1)).sqrt()[group_B]
    normalised_BR = (centred_BR / (std_BR + eps)).masked_fill(std_BR < ZERO_VARIANCE_STD, 0.0)
    return normalised_BR @ weights_R

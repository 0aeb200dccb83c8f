"""From losses per token to one scalar, with denominators that are counted over the whole step.

Shapes: N loss tokens of this micro-batch, S sequences of this micro-batch. Every mode is a
weighted sum whose weights know only global counts. Hence the sum over micro-batches and ranks is
the value of the batch, whatever the split. (A framework that averages gradients over W ranks
needs the loss times W.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

AggregationMode = Literal[
    "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "fixed_length", "prompt_mean"
]


@dataclass(frozen=True, slots=True)
class Denominators:
    """num_loss_tokens, num_sequences and num_groups (those with a loss token) of the whole
    optimizer step, over all ranks and micro-batches, before anything was rejected. For each
    sequence that this micro-batch's sequence_index_N points to: sequence_lengths_S int64, its loss
    tokens, and group_lengths_S int64, those of all sequences of its group.

    Example:
        >>> import torch
        >>> Denominators(7, 3, torch.tensor([4])).num_sequences
        3
    """

    num_loss_tokens: int
    num_sequences: int
    sequence_lengths_S: Tensor
    num_groups: int = 0
    group_lengths_S: Tensor | None = None


def aggregate(
    per_token_N: Tensor,
    sequence_index_N: Tensor,
    mode: AggregationMode,
    denominators: Denominators,
    fixed_length: int | None = None,
) -> Tensor:
    """This micro-batch's share of the loss, a scalar. Shares add up to the loss of the step.

    - token_mean: sum / num_loss_tokens (arXiv:2503.14476, over the batch);
    - seq_mean_token_mean: each sequence's mean, over num_sequences (arXiv:2402.03300);
    - seq_mean_token_sum: sum / num_sequences (REINFORCE);
    - fixed_length: sum / (num_sequences * fixed_length) (arXiv:2503.20783);
    - prompt_mean: each group's token mean, over num_groups (arXiv:2503.14476 as written,
      arXiv:2510.13786).

    No tokens give a 0 that is still part of the graph, so that a rank without tokens can run its
    backward pass. Raises ValueError when the global counts are smaller than what is here, which
    is what a local denominator looks like, or when fixed_length does not go with the mode.
    """
    _check_fixed_length(mode, fixed_length)
    if len(per_token_N) == 0:
        return per_token_N.sum()
    _check_global(len(per_token_N), mode, denominators)
    if mode == "token_mean":
        return per_token_N.sum() / denominators.num_loss_tokens
    if mode == "seq_mean_token_sum":
        return per_token_N.sum() / denominators.num_sequences
    if mode == "fixed_length":
        assert fixed_length is not None
        return per_token_N.sum() / (denominators.num_sequences * fixed_length)
    if mode == "seq_mean_token_mean":
        lengths_S, count = denominators.sequence_lengths_S, denominators.num_sequences
    else:
        assert denominators.group_lengths_S is not None
        lengths_S, count = denominators.group_lengths_S, denominators.num_groups
    lengths_N = lengths_S.to(per_token_N.dtype)[sequence_index_N.long()]
    return (per_token_N / lengths_N).sum() / count


def _check_fixed_length(mode: AggregationMode, fixed_length: int | None) -> None:
    if (mode == "fixed_length") != (fixed_length is not None):
        raise ValueError(
            f"aggregation is {mode!r} and fixed_length is {fixed_length}: give fixed_length with "
            "that mode and with no other"
        )


def _check_global(count: int, mode: AggregationMode, denominators: Denominators) -> None:
    tokens, sequences = denominators.num_loss_tokens, denominators.num_sequences
    no_group = mode == "prompt_mean" and denominators.num_groups < 1
    if tokens < count or sequences < 1 or no_group:
        raise ValueError(
            f"micro-batch holds {count} loss tokens but the step's denominators are "
            f"{tokens} tokens, {sequences} sequences and {denominators.num_groups} groups; pass "
            "the counts of the whole step, taken before it was split"
        )

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

AggregationMode = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "fixed_length"]


@dataclass(frozen=True, slots=True)
class Denominators:
    """num_loss_tokens and num_sequences (those with a loss token) of the whole optimizer step,
    over all ranks and micro-batches; sequence_lengths_S int64: loss tokens of each sequence that
    this micro-batch's sequence_index_N points to, counted over the whole sequence.

    Example:
        >>> import torch
        >>> Denominators(7, 3, torch.tensor([4])).num_sequences
        3
    """

    num_loss_tokens: int
    num_sequences: int
    sequence_lengths_S: Tensor


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
    - fixed_length: sum / (num_sequences * fixed_length) (arXiv:2503.20783).

    No tokens give a 0 that is still part of the graph, so that a rank without tokens can run its
    backward pass. Raises ValueError when the global counts are smaller than what is here, which
    is what a local denominator looks like, or when fixed_length does not go with the mode.
    """
    if (mode == "fixed_length") != (fixed_length is not None):
        raise ValueError(
            f"aggregation is {mode!r} and fixed_length is {fixed_length}: give fixed_length with "
            "that mode and with no other"
        )
    count = len(per_token_N)
    if count == 0:
        return per_token_N.sum()
    num_loss_tokens, num_sequences = denominators.num_loss_tokens, denominators.num_sequences
    if num_loss_tokens < count or num_sequences < 1:
        raise ValueError(
            f"micro-batch holds {count} loss tokens but the step's denominators are "
            f"{num_loss_tokens} tokens and {num_sequences} sequences; pass the counts of the "
            "whole step, taken before it was split"
        )
    if mode == "token_mean":
        return per_token_N.sum() / num_loss_tokens
    if mode == "seq_mean_token_sum":
        return per_token_N.sum() / num_sequences
    if mode == "fixed_length":
        assert fixed_length is not None
        return per_token_N.sum() / (num_sequences * fixed_length)
    lengths_N = denominators.sequence_lengths_S.to(per_token_N.dtype)[sequence_index_N.long()]
    return (per_token_N / lengths_N).sum() / num_sequences

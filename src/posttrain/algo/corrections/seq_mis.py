"""Importance weights of sequences, 0 above a cap."""

from __future__ import annotations

from torch import Tensor

from posttrain.algo.ratios import sequence_weight


def seq_mis(log_mismatch_N: Tensor, sequence_index_N: Tensor, *, cap: float) -> Tensor:
    """The product of w over the sequence where it is at most `cap`, else 0, for each of its tokens.

    Source: https://richardli.xyz/rl-collapse; TRL's `sequence_mask`.
    """
    weight_S = sequence_weight(log_mismatch_N, sequence_index_N)
    return (weight_S * (weight_S <= cap))[sequence_index_N]

"""Off-policy sequence masking."""

from __future__ import annotations

from torch import Tensor

from posttrain.algo.segments import segment_mean


def opsm(
    advantages_N: Tensor, log_mismatch_N: Tensor, sequence_index_N: Tensor, *, delta: float
) -> Tensor:
    """0 where A < 0 and the mean of sampler - prox over the sequence exceeds delta, else 1.

    What went wrong and the policy would hardly say any more is not worth unlearning. Source:
    arXiv:2512.02556 eq. 9 (DeepSeek-V3.2).
    """
    drift_S = segment_mean(-log_mismatch_N, sequence_index_N)
    is_dropped_N = (advantages_N < 0) & (drift_S[sequence_index_N] > delta)
    return (~is_dropped_N).to(log_mismatch_N)

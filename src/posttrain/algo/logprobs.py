"""Log-probs of given tokens under the distribution that is sampled: logits over temperature.

Shapes: N positions, V vocabulary. Row i of the logits is the one that predicts label i; whoever
gathers the rows has done the shift.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_logprobs(logits_NV: Tensor, labels_N: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature)[label], [N], in float32 (float64 for float64 logits).

    The temperature divides logits, never log-probs. Raises ValueError at temperature <= 0.
    """
    scaled_NV = scaled_logits(logits_NV, temperature)
    chosen_N = scaled_NV.gather(-1, labels_N.long().unsqueeze(-1)).squeeze(-1)
    return chosen_N - log_normaliser(scaled_NV)


def log_normaliser(logits_NV: Tensor) -> Tensor:
    """logsumexp over the vocabulary, [N]. Each row's bits are a function of that row alone.

    On a CPU a single row would be reduced in pieces by several threads and round differently, so
    it is never reduced alone. Sampler and learner both use this.
    """
    if len(logits_NV) == 1:
        return torch.logsumexp(logits_NV.expand(2, -1), dim=-1)[:1]
    return torch.logsumexp(logits_NV, dim=-1)


def scaled_logits(logits_NV: Tensor, temperature: float) -> Tensor:
    """Logits in at least float32, over the temperature. Half precision is widened first."""
    if temperature <= 0:
        raise ValueError(
            f"temperature is {temperature}: a log-prob of training needs one above 0; "
            "greedy decoding has no distribution to train"
        )
    if logits_NV.dtype != torch.float64:
        logits_NV = logits_NV.float()
    return logits_NV if temperature == 1.0 else logits_NV / temperature

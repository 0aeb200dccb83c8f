"""Entropy of the next-token distribution.

Shapes: N positions, V vocabulary. Rows do not touch each other: call it on chunks of rows to
bound memory, the result is the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.algo.logprobs import scaled_logits


def entropy(logits_NV: Tensor, temperature: float = 1.0) -> Tensor:
    """H = -sum p log p in nats, [N], in float32 (float64 for float64 logits).

    The gradient is dH/dz_j = -p_j (log p_j + H). A logit of -inf is an impossible token and adds 0.
    """
    scaled_NV = scaled_logits(logits_NV, temperature)
    # From the largest logit down: log Z - sum p z loses no digits to a common offset.
    centred_NV = scaled_NV - scaled_NV.detach().amax(dim=-1, keepdim=True)
    finite_NV = centred_NV.clamp_min(torch.finfo(centred_NV.dtype).min)
    mean_logit_N = (finite_NV.softmax(dim=-1) * finite_NV).sum(dim=-1)
    return finite_NV.logsumexp(dim=-1) - mean_logit_N

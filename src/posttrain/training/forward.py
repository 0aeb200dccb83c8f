"""From packed tokens to the log-prob and entropy of each trained token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from posttrain.algo.entropy import entropy
from posttrain.algo.logprobs import token_logprobs
from posttrain.training.policy import Policy
from posttrain.types import Bool, Microbatch

HEAD_ROWS = 512
"""Rows of the output head computed at a time: [512, V] logits is the most that ever exists."""


def label_rows(loss_mask_T: Bool) -> np.ndarray:
    """Positions whose logits predict the trained tokens [N]: the one place that shifts.

    The logits at position i predict token i + 1, so the token at position j is scored by row
    j - 1. The first token of a sequence is never trained, hence row j - 1 is in its own sequence.
    """
    return np.flatnonzero(loss_mask_T) - 1


@dataclass(frozen=True)
class TokenScores:
    """policy_logprobs_N with gradient and entropy_N without, both float32."""

    policy_logprobs_N: torch.Tensor
    entropy_N: torch.Tensor


def score_tokens(policy: Policy, micro: Microbatch, temperature: float) -> TokenScores:
    """Log-probs of the trained tokens under softmax(logits / temperature), the distribution that
    was sampled. N is the number of True entries of `micro.loss_mask`, in order."""
    ids = torch.from_numpy(micro.token_ids)
    hidden = policy.packed_hidden(ids, torch.from_numpy(micro.position_ids), micro.lengths)
    rows = torch.from_numpy(label_rows(micro.loss_mask))
    labels_N = ids[rows + 1]
    hidden_NH = hidden[rows]
    logprobs, entropies = [], []
    for start in range(0, len(rows), HEAD_ROWS):
        piece = slice(start, start + HEAD_ROWS)
        arguments = (policy, hidden_NH[piece], labels_N[piece], temperature)
        if torch.is_grad_enabled():
            logprob, entropy = checkpoint(_score_rows, *arguments, use_reentrant=False)  # type: ignore[misc]
        else:
            logprob, entropy = _score_rows(*arguments)
        logprobs.append(logprob)
        entropies.append(entropy)
    if not logprobs:
        empty = hidden.new_zeros(0, dtype=torch.float32)
        return TokenScores(empty, empty)
    return TokenScores(torch.cat(logprobs), torch.cat(entropies))


def _score_rows(
    policy: Policy, hidden_MH: torch.Tensor, labels_M: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logits_MV = policy.logits(hidden_MH)
    with torch.no_grad():
        entropy_M = entropy(logits_MV, temperature)
    return token_logprobs(logits_MV, labels_M, temperature), entropy_M

"""From packed rows to the log-prob and entropy of each trained token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from posttrain.algo.entropy import entropy
from posttrain.algo.logprobs import token_logprobs
from posttrain.training.policy import Policy
from posttrain.types import Microbatch

HEAD_ROWS = 512
"""Rows of the output head computed at a time: [512, V] logits is the most that ever exists."""


@dataclass(frozen=True)
class TokenScores:
    """policy_logprobs_N with gradient and entropy_N without, both float32."""

    policy_logprobs_N: torch.Tensor
    entropy_N: torch.Tensor


def score_tokens(policy: Policy, micro: Microbatch, temperature: float) -> TokenScores:
    """Log-probs of the trained tokens [N] under softmax(logits / temperature), the distribution
    that was sampled."""
    hidden_TH = policy.tree_hidden(micro)
    hidden_NH = hidden_TH[torch.from_numpy(micro.predict_rows)]
    labels_N = torch.from_numpy(micro.labels)
    logprobs, entropies = [], []
    for start in range(0, len(labels_N), HEAD_ROWS):
        piece = slice(start, start + HEAD_ROWS)
        arguments = (policy, hidden_NH[piece], labels_N[piece], temperature)
        if torch.is_grad_enabled():
            logprob, entropy = checkpoint(_score_rows, *arguments, use_reentrant=False)  # type: ignore[misc]
        else:
            logprob, entropy = _score_rows(*arguments)
        logprobs.append(logprob)
        entropies.append(entropy)
    if not logprobs:
        empty = hidden_TH.new_zeros(0, dtype=torch.float32)
        return TokenScores(empty, empty)
    return TokenScores(torch.cat(logprobs), torch.cat(entropies))


def _score_rows(
    policy: Policy, hidden_MH: torch.Tensor, labels_M: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logits_MV = policy.logits(hidden_MH)
    with torch.no_grad():
        entropy_M = entropy(logits_MV, temperature)
    return token_logprobs(logits_MV, labels_M, temperature), entropy_M

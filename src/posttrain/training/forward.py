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
    if not len(labels_N):
        empty = hidden_TH.new_zeros(0, dtype=torch.float32)
        return TokenScores(empty, empty)
    logprobs, entropies = [], []
    for start in range(0, len(labels_N), HEAD_ROWS):
        head = _Head(policy, temperature)
        piece = slice(start, start + HEAD_ROWS)
        if torch.is_grad_enabled():
            logprob = checkpoint(head, hidden_NH[piece], labels_N[piece], use_reentrant=False)
        else:
            logprob = head(hidden_NH[piece], labels_N[piece])
        logprobs.append(logprob)
        entropies.append(head.entropy_M)
    return TokenScores(torch.cat(logprobs), torch.cat(entropies))


class _Head:
    """Log-probs of some rows. It runs twice under a checkpoint; the entropy is taken once."""

    def __init__(self, policy: Policy, temperature: float) -> None:
        self._policy = policy
        self._temperature = temperature
        self.entropy_M: torch.Tensor | None = None

    def __call__(self, hidden_MH: torch.Tensor, labels_M: torch.Tensor) -> torch.Tensor:
        logits_MV = self._policy.logits(hidden_MH)
        if self.entropy_M is None:
            self.entropy_M = entropy(logits_MV.detach(), self._temperature)
        return token_logprobs(logits_MV, labels_M, self._temperature)

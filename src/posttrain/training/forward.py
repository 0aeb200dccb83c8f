"""From packed rows to what losses read of each trained token."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from posttrain.algo.entropy import entropy
from posttrain.algo.logprobs import scaled_logits, token_logprobs
from posttrain.training.policy import Policy
from posttrain.types import Microbatch

HEAD_ROWS = 512
"""Rows of the output head computed at a time: [512, V] logits is the most that ever exists."""


@dataclass(frozen=True)
class TokenScores:
    """policy_logprobs_N with gradient and entropy_N, both float32. The entropy has a gradient if
    that was asked for; sum_pi_squared_N (sum of squared probabilities) is there if asked for;
    divergence_N, with gradient, if there is a teacher to compare with."""

    policy_logprobs_N: torch.Tensor
    entropy_N: torch.Tensor
    sum_pi_squared_N: torch.Tensor | None = None
    divergence_N: torch.Tensor | None = None


@dataclass(frozen=True)
class Comparison:
    """A teacher's final hidden states [T, hidden] of the same rows, its output head, and what
    measures the distance of logits [M, V] of student and teacher, [M]."""

    teacher: Policy
    hidden_TH: torch.Tensor
    measure: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def score_tokens(
    policy: Policy, micro: Microbatch, temperature: float, wanted: Set[str] = frozenset()
) -> TokenScores:
    """Scores of the trained tokens [N] under softmax(logits / temperature), the distribution that
    was sampled. `wanted` may name entropy_N (with gradient) and sum_pi_squared_N."""
    return score_hidden(policy, policy.tree_hidden(micro), micro, temperature, wanted)


def score_hidden(
    policy: Policy,
    hidden_TH: torch.Tensor,
    micro: Microbatch,
    temperature: float,
    wanted: Set[str] = frozenset(),
    comparison: Comparison | None = None,
) -> TokenScores:
    """`score_tokens` from final hidden states that are there already."""
    hidden_NH = hidden_TH[torch.from_numpy(micro.predict_rows)]
    labels_N = torch.from_numpy(micro.labels)
    if not len(labels_N):
        empty = hidden_TH.new_zeros(0, dtype=torch.float32)
        return TokenScores(empty, empty, empty, empty)
    predict_N = torch.from_numpy(micro.predict_rows)
    theirs_NH = hidden_NH if comparison is None else comparison.hidden_TH[predict_N]
    head = _Head(policy, temperature, wanted, comparison)
    pieces = []
    for start in range(0, len(labels_N), HEAD_ROWS):
        piece = slice(start, start + HEAD_ROWS)
        if torch.is_grad_enabled():
            scores = checkpoint(
                head, hidden_NH[piece], labels_N[piece], theirs_NH[piece], use_reentrant=False
            )
        else:
            scores = head(hidden_NH[piece], labels_N[piece], theirs_NH[piece])
        pieces.append(scores)
    logprobs_N, entropy_N, squares_N, distance_N = (
        torch.cat(column) for column in zip(*pieces, strict=True)
    )
    return TokenScores(
        logprobs_N,
        entropy_N,
        squares_N if "sum_pi_squared_N" in wanted else None,
        distance_N if comparison is not None else None,
    )


class _Head:
    """Scores of some rows. Under a checkpoint it runs again in the backward pass, which ends once
    the log-probs' tensors are there: what comes after them and has no gradient runs once."""

    def __init__(
        self,
        policy: Policy,
        temperature: float,
        wanted: Set[str],
        comparison: Comparison | None,
    ) -> None:
        self._policy = policy
        self._temperature = temperature
        self._entropy_has_grad = "entropy_N" in wanted
        self._squares = "sum_pi_squared_N" in wanted
        self._comparison = comparison

    def __call__(
        self, hidden_MH: torch.Tensor, labels_M: torch.Tensor, theirs_MH: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        logits_MV = self._policy.logits(hidden_MH)
        logprobs_M = token_logprobs(logits_MV, labels_M, self._temperature)
        for_entropy_MV = logits_MV if self._entropy_has_grad else logits_MV.detach()
        entropy_M = entropy(for_entropy_MV, self._temperature)
        squares_M = entropy_M.detach()
        if self._squares:
            scaled_MV = scaled_logits(logits_MV.detach(), self._temperature)
            squares_M = scaled_MV.softmax(dim=-1).square().sum(dim=-1)
        distance_M = squares_M
        if self._comparison is not None:
            with torch.no_grad():
                theirs_MV = self._comparison.teacher.logits(theirs_MH)
            distance_M = self._comparison.measure(
                scaled_logits(logits_MV, self._temperature),
                scaled_logits(theirs_MV, self._temperature),
            )
        return logprobs_M, entropy_M, squares_M, distance_M

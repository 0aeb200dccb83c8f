"""From packed rows to what losses read of each trained token."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from posttrain.algo.entropy import entropy
from posttrain.algo.logprobs import scaled_logits, token_logprobs
from posttrain.kernels.logits import logit_stats, logit_stats_backward
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
    chunks = [slice(start, start + HEAD_ROWS) for start in range(0, len(labels_N), HEAD_ROWS)]
    if policy.kernel_logits and comparison is None and "sum_pi_squared_N" not in wanted:
        scored = [_KernelHead.of(policy, hidden_NH[c], labels_N[c], temperature) for c in chunks]
        logprobs_N, entropy_N = (torch.cat(column) for column in zip(*scored, strict=True))
        return TokenScores(logprobs_N, entropy_N if "entropy_N" in wanted else entropy_N.detach())
    head = _Head(policy, temperature, wanted, comparison)
    pieces = []
    for piece in chunks:
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


class _KernelHead(torch.autograd.Function):
    """Log-probs and entropy of some rows through the kernels. Logits are computed again in the
    backward pass and turned into their own gradient in place."""

    @staticmethod
    def of(
        policy: Policy, hidden_MH: torch.Tensor, labels_M: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        head = policy.model.get_output_embeddings()
        arguments = (hidden_MH, head.weight, head.bias, policy, labels_M, temperature)
        return _KernelHead.apply(*arguments)  # type: ignore[no-any-return]

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        policy: Policy,
        labels_M: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits_MV = policy.raw_logits(hidden_MH)
        logprobs_M, normaliser_M, entropy_M = logit_stats(logits_MV, labels_M, temperature)
        ctx.save_for_backward(hidden_MH, weight_VH, labels_M, normaliser_M, entropy_M)
        ctx.policy, ctx.temperature, ctx.has_bias = policy, temperature, bias_V is not None
        ctx.set_materialize_grads(False)
        return logprobs_M, entropy_M

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: torch.Tensor | None
    ) -> tuple[Any, ...]:
        hidden_MH, weight_VH, labels_M, normaliser_M, entropy_M = ctx.saved_tensors
        g_logprob_M, g_entropy_M = grads
        if g_logprob_M is None:
            g_logprob_M = torch.zeros_like(normaliser_M)
        slopes_MV = logit_stats_backward(
            ctx.policy.raw_logits(hidden_MH), labels_M, ctx.temperature,
            normaliser_M, entropy_M, g_logprob_M, g_entropy_M,
        )  # fmt: skip
        weight_grad = slopes_MV.T @ hidden_MH if ctx.needs_input_grad[1] else None
        bias_grad = slopes_MV.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return slopes_MV @ weight_VH, weight_grad, bias_grad, None, None, None


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

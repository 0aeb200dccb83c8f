"""Statistics of bf16 logits and sampling from them, row by row. V entries of the vocabulary."""

from __future__ import annotations

import torch

from posttrain.kernels.library import functions, pointer


def logit_stats(
    logits_MV: torch.Tensor, labels_M: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-prob of the labels (int64), log-normaliser and entropy under softmax(logits /
    temperature), float32 [M] each."""
    rows, vocab = logits_MV.shape
    logprob, normaliser, entropy = (torch.empty(rows) for _ in range(3))
    functions().logit_stats(
        pointer(logits_MV), pointer(labels_M), temperature, pointer(logprob),
        pointer(normaliser), pointer(entropy), rows, vocab, torch.get_num_threads(),
    )  # fmt: skip
    return logprob, normaliser, entropy


def logit_stats_backward(
    logits_MV: torch.Tensor,
    labels_M: torch.Tensor,
    temperature: float,
    normaliser_M: torch.Tensor,
    entropy_M: torch.Tensor,
    g_logprob_M: torch.Tensor,
    g_entropy_M: torch.Tensor | None,
) -> torch.Tensor:
    """The gradient in the logits, written over them."""
    rows, vocab = logits_MV.shape
    functions().logit_stats_backward(
        pointer(logits_MV), pointer(labels_M), temperature, pointer(normaliser_M),
        pointer(entropy_M), pointer(g_logprob_M.contiguous()),
        pointer(None if g_entropy_M is None else g_entropy_M.contiguous()), rows, vocab,
        torch.get_num_threads(),
    )  # fmt: skip
    return logits_MV


def sample(
    logits_NV: torch.Tensor, temperature_N: torch.Tensor, uniform_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids int64 and log-probs float32 [N], by inverting each row's distribution at its uniform
    number; temperature 0 takes the largest. The id is -1 where logits are not numbers."""
    rows, vocab = logits_NV.shape
    ids, logprobs = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    functions().sample(
        pointer(logits_NV.contiguous()), pointer(temperature_N), pointer(uniform_N), pointer(ids),
        pointer(logprobs), rows, vocab, torch.get_num_threads(),
    )  # fmt: skip
    return ids, logprobs

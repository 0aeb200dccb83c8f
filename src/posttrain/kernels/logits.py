"""Statistics of bf16 logits and sampling from them, row by row. V entries of the vocabulary."""

from __future__ import annotations

import ctypes

import torch

from posttrain.kernels.library import checked, functions, pointer


def _floats(tensor_M: torch.Tensor | None, rows: int) -> ctypes.c_void_p:
    return pointer(tensor_M, [rows], torch.float32)


def _labels(labels_M: torch.Tensor, rows: int, vocab: int) -> ctypes.c_void_p:
    if rows and not (int(labels_M.min()) >= 0 and int(labels_M.max()) < vocab):
        raise ValueError(f"labels span {labels_M.min()}..{labels_M.max()}, of {vocab} logits")
    return pointer(labels_M, [rows], torch.int64)


def logit_stats(
    logits_MV: torch.Tensor, labels_M: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-prob of the labels (int64), log-normaliser and entropy under softmax(logits /
    temperature), float32 [M] each."""
    rows, vocab = logits_MV.shape
    logprob, normaliser, entropy = (torch.empty(rows) for _ in range(3))
    functions().logit_stats(
        pointer(logits_MV), _labels(labels_M, rows, vocab), temperature, _floats(logprob, rows),
        _floats(normaliser, rows), _floats(entropy, rows), rows, vocab, torch.get_num_threads(),
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
        pointer(logits_MV), _labels(labels_M, rows, vocab), temperature,
        _floats(normaliser_M, rows), _floats(entropy_M, rows),
        _floats(g_logprob_M.contiguous(), rows),
        _floats(None if g_entropy_M is None else g_entropy_M.contiguous(), rows), rows, vocab,
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
    failed = functions().sample(
        pointer(logits_NV.contiguous()), _floats(temperature_N, rows),
        pointer(uniform_N.double(), [rows], torch.float64), pointer(ids, dtype=torch.int64),
        _floats(logprobs, rows), rows, vocab, torch.get_num_threads(),
    )  # fmt: skip
    checked(failed)
    return ids, logprobs

"""Choosing the next token of each sequence from its logits.

Each row is a function of its own logits, params and uniform number, whatever the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from posttrain.algo.logprobs import log_normaliser
from posttrain.errors import EngineError
from posttrain.kernels.logits import sample
from posttrain.types import SamplingParams

BLOCK = 256


def choose_tokens(
    logits_NV: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Sample one token per row by inverting the cumulative distribution at `uniforms[i]`.

    logits_NV float32, or bf16 for the kernels. Returns ids and log-probs under the distribution
    actually sampled: after temperature, then top-k, then top-p, renormalised over what is kept.
    Greedy decoding (temperature 0) is a certain choice: its log-prob is 0. Raises EngineError for
    logits that are not numbers: there is no distribution to sample.
    """
    if logits_NV.dtype == torch.bfloat16:
        return _choose_by_kernel(logits_NV, params, uniforms)
    greedy = torch.tensor([p.temperature == 0 for p in params])
    temperature_N = torch.tensor([p.temperature or 1.0 for p in params], dtype=torch.float32)
    scaled_NV = logits_NV / temperature_N[:, None]
    for row, p in enumerate(params):
        if not greedy[row] and (p.top_k or p.top_p < 1):
            scaled_NV[row] = truncate(scaled_NV[row], p.top_k, p.top_p)
    normaliser_N = log_normaliser(scaled_NV)
    if not torch.isfinite(normaliser_N).all():
        raise _not_numbers()
    drawn_N = _invert(
        torch.exp(scaled_NV - normaliser_N[:, None]),
        torch.from_numpy(np.asarray(uniforms, dtype=np.float32)),
    )
    chosen_N = torch.where(greedy, logits_NV.argmax(-1), drawn_N)
    logprobs_N = scaled_NV.gather(1, chosen_N[:, None])[:, 0] - normaliser_N
    logprobs_N = torch.where(greedy, torch.zeros_like(logprobs_N), logprobs_N)
    return chosen_N.tolist(), logprobs_N.tolist()


def _choose_by_kernel(
    logits_NV: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """The kernel draws from whole distributions; rows that are truncated are drawn here."""
    temperature_N = torch.tensor([p.temperature for p in params], dtype=torch.float32)
    uniform_N = torch.from_numpy(np.asarray(uniforms, dtype=np.float64))
    chosen_N, logprobs_N = sample(logits_NV, temperature_N, uniform_N)
    ids, logprobs = chosen_N.tolist(), logprobs_N.tolist()
    if min(ids) < 0:
        raise _not_numbers()
    cut = [i for i, p in enumerate(params) if p.temperature and (p.top_k or p.top_p < 1)]
    if cut:
        wide = logits_NV[cut].float()
        drawn = choose_tokens(wide, [params[i] for i in cut], [uniforms[i] for i in cut])
        for i, token, logprob in zip(cut, *drawn, strict=True):
            ids[i], logprobs[i] = token, logprob
    return ids, logprobs


def _not_numbers() -> EngineError:
    return EngineError(
        "the model's logits hold NaN or infinity, so no token can be sampled; the weights are "
        "damaged: go back to an earlier checkpoint, or load a sound model"
    )


def truncate(logits_V: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """-inf outside the `top_k` largest and outside the smallest set of mass >= `top_p`.

    Ties are broken by token id, so exactly k tokens survive.
    """
    order = torch.argsort(logits_V, descending=True, stable=True)
    if top_k:
        order = order[:top_k]
    if top_p < 1:
        mass = torch.softmax(logits_V[order], dim=-1).cumsum(-1)
        before = torch.cat([mass.new_zeros(1), mass[:-1]])
        order = order[before < top_p]
    kept = torch.full_like(logits_V, float("-inf"))
    kept[order] = logits_V[order]
    return kept


def _invert(probabilities_NV: torch.Tensor, uniform_N: torch.Tensor) -> torch.Tensor:
    """First token whose cumulative probability exceeds the uniform; never one of probability 0."""
    n, vocab = probabilities_NV.shape
    blocks = -(-vocab // BLOCK)
    padded = torch.zeros(n, blocks * BLOCK)
    padded[:, :vocab] = probabilities_NV
    by_block = padded.view(n, blocks, BLOCK)
    block_mass = by_block.sum(-1)
    block_cumulative = block_mass.cumsum(-1)
    target_N = uniform_N * block_cumulative[:, -1]
    block_N = _first_above(block_cumulative, target_N, block_mass)
    rows = torch.arange(n)
    inside = by_block[rows, block_N]
    rest_N = target_N - (block_cumulative[rows, block_N] - block_mass[rows, block_N])
    return block_N * BLOCK + _first_above(inside.cumsum(-1), rest_N, inside)


def _first_above(
    cumulative_NM: torch.Tensor, target_N: torch.Tensor, mass_NM: torch.Tensor
) -> torch.Tensor:
    """Index of the first entry with positive mass whose cumulative sum exceeds the target.

    Rounding can leave the target at or above the last sum: then the last entry with mass.
    """
    candidate = (cumulative_NM > target_N[:, None]) & (mass_NM > 0)
    first = candidate.to(torch.int8).argmax(-1)
    size = mass_NM.shape[1]
    last = size - 1 - (mass_NM > 0).flip(-1).to(torch.int8).argmax(-1)
    return torch.where(candidate.any(-1), first, last)

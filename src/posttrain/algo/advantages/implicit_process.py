"""Rewards per token that a model trained on outcomes gives by itself."""

from __future__ import annotations

from torch import Tensor


def implicit_process(reward_logprobs_N: Tensor, ref_logprobs_N: Tensor, *, beta: float) -> Tensor:
    """r_t = beta (reward_logprobs - ref_logprobs), [N]. Source: arXiv:2502.01456 (PRIME).

    The reward model is a language model phi, trained online by cross-entropy between
    sigmoid(sum_t r_t) and whether the outcome was correct; hence it keeps its gradient here.
    Equal models give exactly 0.
    """
    return beta * (reward_logprobs_N - ref_logprobs_N)

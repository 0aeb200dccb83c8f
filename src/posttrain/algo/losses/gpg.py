"""Plain policy gradient."""

from __future__ import annotations

from torch import Tensor

from posttrain.algo.losses.terms import LossTerms


def gpg(policy_logprobs_N: Tensor, advantages_N: Tensor) -> LossTerms:
    """-A policy_logprobs: REINFORCE's gradient. Source: arXiv:2504.02546.

    No ratio and no bound: right for one update on fresh samples, and only for that.
    """
    return LossTerms(-advantages_N * policy_logprobs_N)

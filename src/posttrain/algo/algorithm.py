"""One object that is the whole algorithm: groups to advantages, log-probs to a loss.

The learner and the sample builder know this object and no algorithm by name.
Shapes: N loss tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from posttrain.algo.advantages import grpo, grpo_batch, leave_one_out
from posttrain.algo.aggregation import AggregationMode, Denominators, aggregate
from posttrain.algo.credit import Credit, Estimator, assign_credit
from posttrain.algo.losses import LossTerms, ppo_clip
from posttrain.algo.token_stats import TokenStats, token_stats
from posttrain.config import AlgoConfig, GrpoConfig, RlooConfig
from posttrain.types import Group

# policy, prox log-probs and advantages [N] to losses per token.
TokenLoss = Callable[[Tensor, Tensor, Tensor], LossTerms]


@dataclass(frozen=True, slots=True)
class LossOutput:
    """loss: scalar with gradient, this micro-batch's share of the step's loss; stats: detached.

    Example:
        >>> LossOutput(torch.zeros(()), TokenStats(0, {}, {})).stats.num_tokens
        0
    """

    loss: Tensor
    stats: TokenStats


@dataclass(frozen=True, slots=True)
class Algorithm:
    """How rewards become advantages and log-probs become a loss. Built by `build_algorithm`.

    Example:
        >>> build_algorithm(RlooConfig()).aggregation
        'token_mean'
    """

    estimate: Estimator
    token_loss: TokenLoss
    aggregation: AggregationMode
    fixed_length: int | None
    zero_variance: Literal["drop", "keep"]
    truncated: Literal["score", "mask"]

    def advantages(self, groups: Sequence[Group]) -> Credit:
        """One advantage for every trajectory that trains. Takes all groups of the step at once."""
        return assign_credit(
            groups, self.estimate, zero_variance=self.zero_variance, truncated=self.truncated
        )

    def loss(
        self,
        policy_logprobs_N: Tensor,
        prox_logprobs_N: Tensor,
        sampler_logprobs_N: Tensor,
        advantages_N: Tensor,
        sequence_index_N: Tensor,
        denominators: Denominators,
    ) -> LossOutput:
        """This micro-batch's share of the loss, to be minimised; shares add up over the step.

        All [N], loss tokens only, log-probs float32 or float64. Only `policy_logprobs_N` gets a
        gradient. Raises ValueError for half precision or unequal lengths.
        """
        _check_tokens(
            policy=policy_logprobs_N,
            prox=prox_logprobs_N,
            sampler=sampler_logprobs_N,
            advantages=advantages_N,
        )
        terms = self.token_loss(policy_logprobs_N, prox_logprobs_N, advantages_N)
        loss = aggregate(
            terms.per_token_N,
            sequence_index_N,
            self.aggregation,
            denominators,
            self.fixed_length,
        )
        stats = token_stats(
            policy_logprobs_N, prox_logprobs_N, sampler_logprobs_N, advantages_N, terms
        )
        return LossOutput(loss, stats)


def build_algorithm(config: AlgoConfig) -> Algorithm:
    """The algorithm that a recipe's [algo] section describes."""
    return Algorithm(
        estimate=_estimator(config),
        token_loss=partial(ppo_clip, clip_low=config.clip_low, clip_high=config.clip_high),
        aggregation=config.aggregation,
        fixed_length=config.fixed_length,
        zero_variance=config.zero_variance,
        truncated=config.truncated,
    )


def _estimator(config: AlgoConfig) -> Estimator:
    match config:
        case RlooConfig():
            return _each(leave_one_out)
        case GrpoConfig(std="batch"):
            return partial(grpo_batch, eps=config.std_eps)
        case GrpoConfig(std="group" | "none" as std):
            return _each(partial(grpo, std=std, eps=config.std_eps))
    raise AssertionError(f"no estimator for {type(config).__name__}")


def _each(of_group: Callable[[Tensor], Tensor]) -> Estimator:
    return lambda groups: [of_group(rewards_G) for rewards_G in groups]


def _check_tokens(**tokens: Tensor) -> None:
    lengths = {name: tuple(values.shape) for name, values in tokens.items()}
    if len(set(lengths.values())) != 1 or any(len(shape) != 1 for shape in lengths.values()):
        raise ValueError(f"loss needs one entry per loss token everywhere, got shapes {lengths}")
    for name, values in tokens.items():
        if values.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{name} is {values.dtype}: log-probs and advantages need float32 or float64; "
                "take log_softmax of float32 logits"
            )

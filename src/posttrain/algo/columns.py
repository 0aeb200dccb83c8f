"""The columns that losses, estimators, corrections and shaping rules read, and how they're bound.

A rule is a function whose positional parameters are named after columns; nothing else says what it
needs. So its signature is the whole interface: the learner computes reference log-probs because
some rule has a parameter `ref_logprobs_N`.

Columns of a group (float64 unless said), G members that enter the statistics:

    rewards_G          shaped rewards
    outcomes_G         rewards before shaping
    correct_G          bool, the verdicts' outcome
    lengths_G          sampled tokens
    terms_GR           reward terms before their weights, one column a name of the batch
    term_weights_R     those weights;   batch_terms: terms_GR of every group of the batch
    greedy_reward      scalar: reward of the greedy trajectory
    role_baseline      float: moving average of the rewards of the members' role
    num_turns_G        turns of each member
    turn_rewards       one tensor [K] a member: what the environment gave for its turns alone
    turn_states        one list of K strings a member: what identifies the state a turn began in
    token_ids          one int64 tensor a member: sampled tokens
    batch_rewards      rewards_G of every group of the batch

Columns of tokens, N loss tokens end to end. In the learner over a whole step, without gradient
(estimators and corrections), or over a micro-batch (losses):

    prox_logprobs_N    the trainer's at the start of the step; in a loss the anchor
    sampler_logprobs_N as the sampler reported them
    log_mismatch_N     prox - sampler, clamped
    ref_logprobs_N     of the reference;   teacher_logprobs_N of the teacher
    entropy_N          of the policy's distribution; in a loss it has a gradient
    sum_pi_squared_N   sum of the squared probabilities of that distribution
    values_N           the critic's, of the state in which the token is chosen
    rewards_N          rewards where they arrive: each turn's own at its last token, the outcome
                       at the trajectory's, less the KL penalty of every token
    bootstrap_S        value after the last token of a trajectory that a limit cut, if the critic's
                       settings ask for it; else 0
    advantages_N       what the stream says
    sequence_index_N   int64: which sequence;   trajectory_index_N: which trajectory
    turn_index_N       int64: which turn of its trajectory;   group_index_N: which group
    policy_logprobs_N  losses only, with gradient
    divergence_N       losses only: of the policy's whole distribution from the teacher's
    seed               int, of the step: for rules that choose at random

Columns of pairs, P pairs: sums over the tokens of a side.

    policy_chosen_P, policy_rejected_P, ref_chosen_P, ref_rejected_P
    chosen_lengths_P, rejected_lengths_P
    scores_chosen_P, scores_rejected_P     a reward model's

Columns of single answers, S answers:

    policy_sum_S, ref_sum_S   sums over the tokens of an answer
    desirable_S               bool, what the stream says of it
    kl_baseline               scalar, of the step, without gradient
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import BaseModel


@dataclass(frozen=True)
class Rule:
    """A function over columns with its settings.

    Example:
        >>> Rule(lambda rewards_G, *, scale: rewards_G * scale, {"scale": 2})({"rewards_G": 3})
        6
    """

    function: Callable[..., Any]
    settings: Mapping[str, Any]

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns it reads."""
        kinds = inspect.signature(self.function).parameters.values()
        return tuple(p.name for p in kinds if p.kind is p.POSITIONAL_OR_KEYWORD)

    @classmethod
    def of(cls, function: Callable[..., Any], config: BaseModel) -> Rule:
        """With the config's fields as the function's keyword-only arguments."""
        parameters = inspect.signature(function).parameters.values()
        wanted = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        return cls(function, {key: getattr(config, key) for key in wanted})

    def on(self, *arguments: Any) -> Any:
        """The function on given arguments, with its settings."""
        return self.function(*arguments, **self.settings)

    def __call__(self, columns: Mapping[str, Any]) -> Any:
        return self.function(*(columns[name] for name in self.columns), **self.settings)


def rule(package: str, config: BaseModel) -> Rule:
    """The function that a config's `type` names in `posttrain.algo.<package>`, with its settings.

    `package.TYPE:TYPE` by convention: a new rule is one file and one config class.
    """
    name: str = config.type  # type: ignore[attr-defined]
    module = importlib.import_module(f"posttrain.algo.{package}.{name}")
    return Rule.of(getattr(module, name), config)

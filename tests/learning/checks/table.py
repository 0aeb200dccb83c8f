"""A policy of one table of logits behind the real learner: bandits, without a transformer.

An arm is a token. An episode is a prompt of one token and one arm. Shapes: A arms.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.algo.builder import build_algorithm
from posttrain.config import Recipe
from posttrain.data.samples import build_batch
from posttrain.training.frozen import CopiedReference
from posttrain.training.learner import InlineLearner
from posttrain.types import (
    Completion,
    Draw,
    FinishReason,
    Group,
    Microbatch,
    Scored,
    StepResult,
    StopReason,
    TokenSequence,
    Trajectory,
    Turn,
)

PROMPT = 0


class _Table(torch.nn.Module):
    def __init__(self, logits_A: Tensor) -> None:
        super().__init__()
        self.logits_A = torch.nn.Parameter(logits_A.float().clone())


class TablePolicy:
    """What the learner reads of a policy."""

    def __init__(self, logits_A: Tensor) -> None:
        self.model = _Table(logits_A)
        self.lock = threading.Lock()

    exact = kernel_logits = False  # no kernel reads a table

    def padded_rows(self, count: int) -> int:
        return count

    def tree_hidden(self, micro: Microbatch) -> Tensor:
        """Nothing: every state is the same."""
        return torch.zeros(micro.num_rows, 1)

    def logits(self, hidden_MH: Tensor) -> Tensor:
        return self.model.logits_A.expand(len(hidden_MH), -1)

    @property
    def logprobs_A(self) -> Tensor:
        return self.model.logits_A.detach().double().log_softmax(0)


class Bandit:
    """A table, its learner, and groups drawn from it or from another distribution.

    `pay(arm, chance)` is the reward of one pull.
    """

    def __init__(
        self,
        algo: Mapping[str, Any],
        logits_A: Tensor,
        pay: Callable[[int, np.random.Generator], float],
        *,
        seed: int = 0,
        lr: float = 1e-12,
        num_steps: int = 1,
        schedule: str = "constant",
    ) -> None:
        whole = {
            "name": "bandit",
            "seed": seed,
            "num_steps": num_steps,
            "env": {"type": "largest"},
            "rollout": {"groups_per_step": 1, "group_size": 2},
            "algo": algo,
            "optim": {"lr": lr, "max_grad_norm": 1e9, "schedule": schedule},
            "learner": {"max_tokens_per_microbatch": 1_000_000},
        }
        config = Recipe.model_validate(whole)
        self.policy = TablePolicy(logits_A)
        self.algorithm = build_algorithm(config.algo)
        reference = None
        if "ref_logprobs_N" in self.algorithm.columns:
            reference = CopiedReference(TablePolicy(logits_A), moves=False)  # type: ignore[arg-type]
        self.learner = InlineLearner(
            self.policy,  # type: ignore[arg-type]
            self.algorithm,
            config,
            reference=reference,
        )
        self._pay = pay
        self._chance = np.random.default_rng(seed)
        self._drawn = 0

    def groups(
        self,
        num_groups: int,
        group_size: int,
        sampler_A: Tensor | None = None,
        greedy: int | None = None,
    ) -> list[Group]:
        """Groups of pulls by the policy, or by `sampler_A` (log-probs), which the records state.
        With `greedy` each has that arm beside them as its greedy answer."""
        logprobs_A = (self.policy.logprobs_A if sampler_A is None else sampler_A).numpy()
        chances_A = np.exp(logprobs_A)
        shape = (num_groups, group_size)
        arms = self._chance.choice(len(chances_A), shape, p=chances_A / chances_A.sum())
        return [self.group(row.tolist(), logprobs_A, greedy) for row in arms]

    def group(self, arms: Sequence[int], logprobs_A: Any, greedy: int | None = None) -> Group:
        """The group of these pulls."""
        draw = Draw(self._drawn, "bandit", 0, self._drawn)
        self._drawn += 1
        members = [
            self._member(draw, i, arm, float(logprobs_A[arm]), "") for i, arm in enumerate(arms)
        ]
        if greedy is not None:
            members.append(
                self._member(draw, len(arms), greedy, float(logprobs_A[greedy]), "greedy")
            )
        return Group(draw, tuple(members))

    def _member(self, draw: Draw, index: int, arm: int, logprob: float, role: str) -> Trajectory:
        turn, sequence = _pull(arm, logprob)
        verdict = Scored(float(self._pay(arm, self._chance)))
        return Trajectory(
            draw.draw_id,
            index,
            0,
            (turn,),
            (sequence,),
            verdict,
            StopReason.TERMINATED,
            role=role,
        )

    def step(self, groups: Sequence[Group]) -> StepResult:
        """One step of the learner."""
        step = self.learner.policy_version + 1
        return self.learner.step(build_batch(step, groups, self.algorithm, self.learner.memory))

    def gradient(self, groups: Sequence[Group]) -> Tensor:
        """Ascent direction of the loss on these groups, [A] float64; the table stays."""
        self.step(groups)
        assert self.policy.model.logits_A.grad is not None
        return -self.policy.model.logits_A.grad.double()


@cache
def _pull(arm: int, logprob: float) -> tuple[Turn, TokenSequence]:
    """Records of one pull; trajectories of the same arm share them."""
    completion = Completion.build([arm], [logprob], [0], FinishReason.LENGTH, str(arm))
    sequence = TokenSequence.build([PROMPT, arm], [2, 0], [0.0, logprob], [-1, 0])
    return Turn(np.array([PROMPT], np.int32), completion), sequence

"""A run without journal and checkpoints: producer, sampler, batch, learner, in the loop's order."""

from __future__ import annotations

import asyncio
import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from posttrain.build import build_rollable, build_trainable, rollout_extras, train_params
from posttrain.config import Recipe
from posttrain.data.curriculum import UniformCurriculum
from posttrain.data.samples import build_batch
from posttrain.protocols import EnvSpec
from posttrain.rollout.producer import RolloutProducer
from posttrain.telemetry.observer import SilentObserver
from posttrain.training.models import write_tiny_char
from posttrain.training.policy import Policy
from posttrain.types import Draw, Group, SamplingParams, TrainBatch

AVERAGED = 5
"""Steps whose mean reward is compared with the bound: one step is noisy."""


@cache
def tiny_char() -> tempfile.TemporaryDirectory[str]:
    """A tiny-char folder, written once a process."""
    folder = tempfile.TemporaryDirectory(prefix="tiny-char-")
    write_tiny_char(Path(folder.name))
    return folder


@dataclass
class Spoil:
    """What a negative control breaks, or the behaviour that a check sets apart.

    `groups` and `batch` change records on their way; `frozen_sampler` keeps the first weights in
    the sampler, which still says the newest version; `sampling` replaces the sampler's settings,
    of which the learner knows nothing.
    """

    groups: Callable[[Sequence[Group], int], list[Group]] | None = None
    batch: Callable[[TrainBatch], TrainBatch] | None = None
    frozen_sampler: bool = False
    sampling: SamplingParams | None = None


@dataclass
class Curve:
    """rewards: mean reward of each step's groups, or what `measure` said of the policy that drew
    them. reached: the step after which the mean of the last steps was at least the bound, None if
    it never was."""

    bound: float
    rewards: list[float] = field(default_factory=list)
    metrics: list[Mapping[str, float]] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)
    reached: int | None = None

    @property
    def recent(self) -> float:
        last = self.rewards[-AVERAGED:]
        return sum(last) / len(last)

    @property
    def best(self) -> float:
        """The highest mean of `AVERAGED` steps in a row."""
        n = AVERAGED
        means = [sum(self.rewards[i : i + n]) / n for i in range(len(self.rewards) - n + 1)]
        return max(means, default=self.recent)


def learn(
    recipe: Recipe,
    spec: EnvSpec,
    *,
    bound: float,
    num_steps: int | None = None,
    spoil: Spoil | None = None,
    whole: bool = False,
    measure: Callable[[Policy], float] | None = None,
) -> Curve:
    """Train tiny-char until the mean of the last steps is at least `bound`; with `whole` to the
    end. `measure` says what the policy is worth where the sampler draws from another one."""
    torch.set_num_threads(1)
    curve, steps = Curve(bound), num_steps or recipe.num_steps
    asyncio.run(_learn(recipe, spec, curve, steps, spoil or Spoil(), whole, measure))
    return curve


async def _learn(
    recipe: Recipe,
    spec: EnvSpec,
    curve: Curve,
    num_steps: int,
    spoil: Spoil,
    whole: bool,
    measure: Callable[[Policy], float] | None,
) -> None:
    trainable = build_trainable(recipe, SilentObserver())
    learner, algorithm = trainable.learner, trainable.algorithm
    policy = trainable.policy
    if spoil.frozen_sampler:
        policy = replace(policy, model=copy.deepcopy(policy.model))
    rollable = await build_rollable(recipe, spec, policy, Path())
    assert rollable.runner is not None
    producer = RolloutProducer(
        rollable.runner,
        UniformCurriculum(rollable.train_tasks, recipe.seed),
        _Nowhere(),
        spoil.sampling or train_params(recipe),
        groups_per_step=recipe.rollout.groups_per_step,
        group_size=recipe.rollout.group_size,
        max_policy_lag=recipe.max_policy_lag,
        num_steps=recipe.num_steps,
        extras=rollout_extras(recipe),
    )
    for step in range(1, num_steps + 1):
        groups = await producer.take(step - 1)
        await _drain(producer)
        curve.rewards.append(measure(trainable.policy) if measure else _mean_reward(groups))
        if spoil.groups is not None:
            groups = spoil.groups(groups, step)
        batch = build_batch(step, groups, algorithm, learner.memory)
        result = learner.step(spoil.batch(batch) if spoil.batch else batch)
        await rollable.sampler.load_weights(result.policy_version)
        curve.metrics.append(result.metrics)
        curve.hashes.append(result.weights_hash)
        if curve.reached is None and step >= AVERAGED and curve.recent >= curve.bound:
            curve.reached = step
            if not whole:
                break
    await producer.close()
    await rollable.close()


async def _drain(producer: RolloutProducer) -> None:
    """Let what is in flight be drawn from the present weights, so that groups lag by the whole
    bound. Without it the engine, which shares the thread, draws them all when the first is due."""
    await asyncio.sleep(0)
    while producer.num_in_flight:
        await asyncio.sleep(0)


class _Nowhere:
    """A journal of nothing."""

    def record_draw(self, draw: Draw) -> None: ...

    def record_group(self, group: Group) -> None: ...

    def drop_draw(self, draw_id: int, reason: str) -> None: ...


def _mean_reward(groups: Sequence[Group]) -> float:
    """Of the siblings' outcomes. An invalid episode would be a broken check and raises."""
    totals = [t.reward for group in groups for t in group.siblings]
    return sum(totals) / len(totals)


def recipe(algo: Mapping[str, Any], **sections: Any) -> Recipe:
    """A recipe for tiny-char from plain values. The environment is given to `learn`; the one here
    only fills the place."""
    whole = {
        "name": "learning-check",
        "threads": 1,
        "model": {"path": tiny_char().name, "dtype": "float32"},
        "env": {"type": "largest"},
        "algo": algo,
        **sections,
    }
    return Recipe.model_validate(whole)

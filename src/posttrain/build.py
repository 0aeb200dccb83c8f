"""From a recipe to the real parts behind the protocols."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from posttrain.algo.algorithm import Algorithm, build_algorithm
from posttrain.config import Recipe, default_threads
from posttrain.envs import build_env_spec
from posttrain.errors import ConfigError, DataError
from posttrain.evaluation.evaluator import Evaluator
from posttrain.protocols import EnvSpec, Reward, TaskSet
from posttrain.rollout.episode import EpisodeLimits, EpisodeRunner
from posttrain.rollout.prompts import fit_prompts
from posttrain.rollout.recorder import Renderer
from posttrain.sampling.embedded import EmbeddedSampler
from posttrain.telemetry.observer import Observer
from posttrain.training.learner import InlineLearner
from posttrain.training.models import resolve_model
from posttrain.training.policy import Policy, load_policy
from posttrain.types import SamplingParams


@dataclass(frozen=True)
class Trainable:
    """Policy, algorithm and learner: all that a redo or a replay needs."""

    policy: Policy
    algorithm: Algorithm
    learner: InlineLearner


@dataclass(frozen=True)
class Rollable:
    """Environment, reward, sampler and runner: all that generating needs."""

    spec: EnvSpec
    reward: Reward | None
    sampler: EmbeddedSampler
    runner: EpisodeRunner
    renderer: Renderer
    train_tasks: TaskSet
    eval_tasks: TaskSet

    async def close(self) -> None:
        """Stop generation and grader processes."""
        await self.sampler.abort()
        if self.reward is not None:
            await self.reward.close()


def set_threads(recipe: Recipe) -> int:
    """Fix the number of compute threads: sums are split by it, so it is part of the result."""
    threads = recipe.threads or default_threads()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(recipe.deterministic)
    # Nothing here reads uninitialised memory, so there is no need to fill it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    return threads


def build_trainable(recipe: Recipe, observer: Observer) -> Trainable:
    """Resolve, fetch if needed, and load the model; wrap it in a learner."""
    folder = resolve_model(recipe.model.path, progress=observer.message)
    policy = load_policy(
        folder,
        dtype=recipe.model.dtype,
        attention_kind=recipe.model.attention,
        max_context=recipe.model.max_context,
        gradient_checkpointing=recipe.learner.gradient_checkpointing,
    )
    algorithm = build_algorithm(recipe.algo)
    return Trainable(policy, algorithm, InlineLearner(policy, algorithm, recipe))


def build_spec(recipe: Recipe, base_dir: Path) -> EnvSpec:
    """The environment of a recipe, checked."""
    return build_env_spec(recipe.env, seed=recipe.seed, base_dir=base_dir)


async def build_rollable(
    recipe: Recipe, spec: EnvSpec, policy: Policy, policy_version: int = 0
) -> Rollable:
    """Everything that generates, with prompts measured and the reward function looked at.

    Raises ConfigError, DataError or ModelError for what cannot work, before anything is drawn.
    """
    room = policy.max_context - max(recipe.sampler.max_tokens, recipe.eval_max_tokens)
    if room < 1:
        raise ConfigError(
            f"sampler.max_tokens {recipe.sampler.max_tokens} and eval.max_tokens "
            f"{recipe.eval_max_tokens} leave no room for a prompt in a context of "
            f"{policy.max_context} tokens; lower them or raise model.max_context"
        )
    renderer = Renderer(policy.tokenizer, policy.eos_token_ids)
    rule = recipe.rollout.overlong_prompt
    train_tasks = fit_prompts(spec.train_tasks(), renderer, room, rule, "training tasks")
    eval_tasks = fit_prompts(spec.eval_tasks(), renderer, room, rule, "held-out tasks")
    for tasks, what in ((train_tasks, "training"), (eval_tasks, "held-out")):
        if not len(tasks):
            raise DataError(f"environment {spec.name} has no {what} task; give it at least one")
    reward = spec.reward()
    await _prepare(reward, spec)
    sampler = EmbeddedSampler(policy, max_batch=recipe.sampler.max_batch, version=policy_version)
    limits = EpisodeLimits(
        max_turns=recipe.rollout.max_turns,
        max_context=policy.max_context,
        max_prompt=room,
        cut_prompt_to=room if rule == "truncate_left" else None,
        timeout_s=recipe.rollout.episode_timeout_s,
        max_attempts=recipe.rollout.max_attempts,
    )
    runner = EpisodeRunner(spec, reward, sampler, renderer, limits)
    return Rollable(spec, reward, sampler, runner, renderer, train_tasks, eval_tasks)


def build_evaluator(recipe: Recipe, rollable: Rollable) -> Evaluator:
    """Evaluation with the recipe's own sampling block."""
    return Evaluator(
        runner=rollable.runner,
        tasks=rollable.eval_tasks,
        params=eval_params(recipe),
        num_tasks=recipe.eval.num_tasks,
        samples_per_task=recipe.eval.samples_per_task,
        run_seed=recipe.seed,
    )


def train_params(recipe: Recipe) -> SamplingParams:
    """The recipe's [sampler] block."""
    s = recipe.sampler
    return SamplingParams(s.max_tokens, s.temperature, s.top_p, s.top_k, s.stop)


def eval_params(recipe: Recipe) -> SamplingParams:
    """The recipe's [eval] block; stop strings default to the sampler's."""
    e = recipe.eval
    params = SamplingParams(recipe.eval_max_tokens, e.temperature, e.top_p, e.top_k, e.stop)
    return params if e.stop else replace(params, stop=recipe.sampler.stop)


async def _prepare(reward: Reward | None, spec: EnvSpec) -> None:
    """Let a user's reward function be checked against the columns there are."""
    prepare = getattr(reward, "prepare", None)
    if prepare is not None:
        outcome = prepare(list(getattr(spec, "columns", ())))
        if inspect.isawaitable(outcome):
            await outcome

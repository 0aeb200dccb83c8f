"""From a recipe to the real parts behind the protocols."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from posttrain.algo.algorithm import Algorithm
from posttrain.algo.builder import build_algorithm
from posttrain.config import LoraConfig, Recipe, RewardModelConfig, default_threads
from posttrain.data.given import given_tasks
from posttrain.data.mixture import MixtureTasks, curriculum_of
from posttrain.data.tasks import TaskList, prompt_key
from posttrain.envs import build_env_spec
from posttrain.envs.mixture import MixtureReward, MixtureSpec
from posttrain.errors import ConfigError, DataError
from posttrain.evaluation.evaluator import Evaluator
from posttrain.evaluation.given import GivenEvaluator
from posttrain.journal import Journal
from posttrain.kernels.library import LEAVE_OUT, kind, library
from posttrain.memory import keep_freed_memory, memory_limit
from posttrain.protocols import EnvSpec, GroupSource, Reward, TaskSet
from posttrain.rollout.episode import EpisodeLimits, EpisodeRunner
from posttrain.rollout.given import GivenProducer, check_given
from posttrain.rollout.producer import RolloutProducer
from posttrain.rollout.prompts import MAX_SCANNED, fit_prompts
from posttrain.rollout.recorder import Renderer
from posttrain.sampling.embedded import EmbeddedSampler
from posttrain.telemetry.observer import Observer
from posttrain.training.frozen import BaseReference, CopiedReference, FrozenModel, Reference
from posttrain.training.heads import Scorer
from posttrain.training.learner import InlineLearner
from posttrain.training.models import resolve_model
from posttrain.training.policy import Policy, load_policy
from posttrain.types import Group, SamplingParams, Task

logger = logging.getLogger("posttrain")


@dataclass(frozen=True)
class Trainable:
    """Policy, algorithm and learner: all that a redo or a replay needs."""

    policy: Policy
    algorithm: Algorithm
    learner: InlineLearner


@dataclass(frozen=True)
class Rollable:
    """Where groups come from: an environment with a sampler, given rows, or both, when rows train
    and the environment evaluates."""

    sampler: EmbeddedSampler
    renderer: Renderer
    train_tasks: TaskSet
    eval_tasks: TaskSet
    max_context: int
    spec: EnvSpec | None = None
    reward: Reward | None = None
    runner: EpisodeRunner | None = None

    async def close(self) -> None:
        """Stop generation and grader processes."""
        await self.sampler.abort()
        if self.reward is not None:
            await self.reward.close()


def set_threads(recipe: Recipe) -> int:
    """Fix the number of compute threads: sums are split by it, so it is part of the result."""
    threads = recipe.threads or default_threads()
    torch.set_num_threads(threads)
    keep_freed_memory()
    torch.use_deterministic_algorithms(recipe.deterministic)
    # Nothing here reads uninitialised memory, so there is no need to fill it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    return threads


KERNELS = "kernels"
"""Among the packages of a run's header: what computed its bf16 rows."""


def other_kernels(packages: Mapping[str, str], recipe: Recipe) -> str | None:
    """Why a run that began with these packages cannot be computed further here, if so."""
    began, now = packages.get(KERNELS, "torch"), kind()
    if recipe.model.dtype != "bfloat16" or began == now:
        return None
    remedy = f"set {LEAVE_OUT}=0"
    if began == "compiled":
        remedy = f"mend what is missing: {library().problem}"
    return (
        f"it was computed with {began} kernels, now they are {now}: sums would round differently "
        f"and the redo would not match; {remedy}"
    )


def build_trainable(recipe: Recipe, observer: Observer) -> Trainable:
    """Resolve, fetch if needed, and load the model; wrap it in a learner."""
    policy = _load(recipe, recipe.model.path, observer, recipe.model.lora, trained=True)
    algorithm = build_algorithm(recipe.algo, recipe.algo_for)
    learner = InlineLearner(
        policy,
        algorithm,
        recipe,
        reference=_reference(recipe, algorithm, policy, observer),
        teacher=_teacher(recipe, policy, observer),
        scorer=_scorer(recipe, policy, observer),
    )
    return Trainable(policy, algorithm, learner)


def _load(
    recipe: Recipe,
    path: str,
    observer: Observer,
    lora: LoraConfig | None = None,
    trained: bool = False,
) -> Policy:
    return load_policy(
        resolve_model(path, progress=observer.message),
        dtype=recipe.model.dtype,
        attention_kind=recipe.model.attention,
        max_context=recipe.model.max_context,
        gradient_checkpointing=recipe.learner.gradient_checkpointing,
        lora=lora,
        seed=recipe.seed,
        trained=trained,
    )


def _kv_tokens(recipe: Recipe, policy: Policy) -> int:
    """What the recipe says, or room for whole contexts within a quarter of the memory; it is taken
    as it is written. Raises ConfigError for more than the memory."""
    limit, asked = memory_limit() // policy.kv_bytes_per_token, recipe.sampler.kv_tokens
    if asked is not None and asked > limit:
        raise ConfigError(
            f"sampler.kv_tokens is {asked}: keys of this model take {policy.kv_bytes_per_token} "
            f"bytes a token, and the memory holds {limit}; lower it"
        )
    whole_contexts = recipe.sampler.max_batch * policy.max_context
    return asked or min(whole_contexts, max(limit // 4, policy.max_context))


def _reference(
    recipe: Recipe, algorithm: Algorithm, policy: Policy, observer: Observer
) -> Reference | None:
    """The model that the run begins with, if a loss reads it; without a copy under an adapter."""
    if "ref_logprobs_N" not in algorithm.columns:
        return None
    if recipe.model.lora is not None:
        return BaseReference(policy)
    kl = getattr(recipe.algo, "kl", None)
    moves = kl is not None and bool(kl.reset_every or kl.sync_every)
    return CopiedReference(_load(recipe, recipe.model.path, observer), moves)


def _teacher(recipe: Recipe, policy: Policy, observer: Observer) -> FrozenModel | None:
    """Raises ConfigError when the teacher reads other tokens than the student."""
    name = _of_any(recipe, "teacher")
    if name is None:
        return None
    teacher = _load(recipe, name, observer)
    if teacher.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise ConfigError(
            f"algo.teacher {name} has another vocabulary than model {recipe.model.path}; "
            "distillation compares token by token: take a teacher with the same tokenizer"
        )
    return FrozenModel(teacher)


def _of_any(recipe: Recipe, key: str) -> Any:
    """What an algorithm of the run has under `key`; those that have one agree."""
    algos = (recipe.algo, *recipe.algo_for.values())
    return next((getattr(algo, key) for algo in algos if hasattr(algo, key)), None)


def _scorer(recipe: Recipe, policy: Policy, observer: Observer) -> Scorer | None:
    """The critic's or the reward model's head."""
    if isinstance(recipe.algo, RewardModelConfig):
        optim = recipe.optim.model_copy(update={"lr": recipe.algo.head_lr})
        return Scorer(policy, optim, bias=False)  # scores are compared; transformers has no bias
    critic = _of_any(recipe, "critic")
    if critic is None:
        return None
    optim = recipe.optim.model_copy(
        update=critic.model_dump(include={"lr", "weight_decay", "max_grad_norm"})
    )
    own = _load(recipe, recipe.model.path, observer) if critic.trunk == "own" else None
    return Scorer(
        policy,
        optim,
        own,
        pretrain_steps=critic.pretrain_steps,
        bootstraps=critic.bootstrap_truncated,
    )


def build_spec(recipe: Recipe, base_dir: Path) -> EnvSpec | None:
    """The environment of a recipe, checked; None for a recipe of given data alone."""
    if recipe.env is None:
        return None
    return build_env_spec(recipe.env, seed=recipe.seed, base_dir=base_dir)


async def build_rollable(
    recipe: Recipe, spec: EnvSpec | None, policy: Policy, base_dir: Path, policy_version: int = 0
) -> Rollable:
    """Everything that makes groups, with prompts measured and the reward function looked at.

    Raises ConfigError, DataError or ModelError for what cannot work, before anything is drawn.
    """
    renderer = Renderer(policy.tokenizer, policy.eos_token_ids)
    sampler = EmbeddedSampler(
        policy,
        max_batch=recipe.sampler.max_batch,
        kv_tokens=_kv_tokens(recipe, policy),
        version=policy_version,
    )
    given = (
        None if recipe.data is None else given_tasks(recipe.data, base_dir, hold_out=spec is None)
    )
    if given is not None:
        check_given(renderer, [*given[0], *given[1]], policy.max_context)
    if spec is None:
        assert given is not None
        train, held_out = (TaskList(tasks) for tasks in given)
        return Rollable(sampler, renderer, train, held_out, policy.max_context)
    rollable = await _build_playable(recipe, spec, policy, renderer, sampler)
    warn_about_trained_evaluation(rollable, given[0] if given else ())
    return rollable if given is None else replace(rollable, train_tasks=TaskList(given[0]))


def warn_about_trained_evaluation(rollable: Rollable, given: Sequence[Task]) -> None:
    """Log a warning where prompts are evaluated that given rows, or another member of a mixture,
    train. Of a large set the first tasks are looked at."""
    evaluated = _prompts(rollable.eval_tasks)
    trained = {prompt_key(task.prompt) for task in given}
    if isinstance(rollable.train_tasks, MixtureTasks):
        assert isinstance(rollable.eval_tasks, MixtureTasks)
        evaluated = set()
        for name, tasks in rollable.eval_tasks.members.items():
            others = [t for n, t in rollable.train_tasks.members.items() if n != name]
            evaluated |= _prompts(tasks) & set().union(*map(_prompts, others))
        trained = trained | evaluated
    if shared := len(evaluated & trained):
        logger.warning(
            "%d of the evaluated prompts are trained by %s: the evaluation is not held out; take "
            "them out of one of the two",
            shared,
            "the given rows" if given else "another member of the mixture",
        )


def _prompts(tasks: TaskSet) -> set[str]:
    return {prompt_key(tasks[i].prompt) for i in range(min(len(tasks), MAX_SCANNED))}


async def _build_playable(
    recipe: Recipe, spec: EnvSpec, policy: Policy, renderer: Renderer, sampler: EmbeddedSampler
) -> Rollable:
    room = policy.max_context - max(recipe.sampler.max_tokens, recipe.eval_max_tokens)
    if room < 1:
        raise ConfigError(
            f"sampler.max_tokens {recipe.sampler.max_tokens} and eval.max_tokens "
            f"{recipe.eval_max_tokens} leave no room for a prompt in a context of "
            f"{policy.max_context} tokens; lower them or raise model.max_context"
        )
    _check_relabel(recipe, spec)
    rule = recipe.rollout.overlong_prompt
    train_tasks = fit_prompts(spec.train_tasks(), renderer, room, rule, "training tasks")
    eval_tasks = fit_prompts(spec.eval_tasks(), renderer, room, rule, "held-out tasks")
    for tasks, what in ((train_tasks, "training"), (eval_tasks, "held-out")):
        members = tasks.members if isinstance(tasks, MixtureTasks) else {spec.name: tasks}
        for name, own in members.items():
            if not len(own):
                raise DataError(f"environment {name} has no {what} task; give it at least one")
    reward = spec.reward()
    await _prepare(reward, spec)
    limits = EpisodeLimits(
        max_turns=recipe.rollout.max_turns,
        max_context=policy.max_context,
        max_prompt=room,
        cut_prompt_to=room if rule == "truncate_left" else None,
        timeout_s=recipe.rollout.episode_timeout_s,
        max_attempts=recipe.rollout.max_attempts,
    )
    runner = EpisodeRunner(spec, reward, sampler, renderer, limits)
    return Rollable(
        sampler, renderer, train_tasks, eval_tasks, policy.max_context, spec, reward, runner
    )


def build_producer(
    recipe: Recipe, rollable: Rollable, algorithm: Algorithm, journal: Journal
) -> GroupSource:
    """What hands out groups: rollouts, or given rows; it goes on where the journal ends."""
    curriculum = curriculum_of(rollable.train_tasks, recipe.seed)
    open_draws = [
        (draw, journal.group(draw.draw_id) if has_group else None)
        for draw, has_group in journal.open_draws()
    ]
    next_draw_id, per_step = journal.next_draw_id(), recipe.rollout.groups_per_step
    if recipe.data is not None:
        return GivenProducer(
            rollable.renderer,
            curriculum,
            journal,
            max_tokens=rollable.max_context,
            groups_per_step=per_step,
            next_draw_id=next_draw_id,
            open_draws=open_draws,
        )
    assert rollable.runner is not None
    return RolloutProducer(
        rollable.runner,
        curriculum,
        journal,
        train_params(recipe),
        groups_per_step=per_step,
        group_size=recipe.rollout.group_size,
        max_policy_lag=recipe.max_policy_lag,
        num_steps=recipe.num_steps,
        extras=rollout_extras(recipe),
        teaches=_teaches(algorithm) if recipe.rollout.refill else None,
        max_refill=recipe.rollout.max_refill,
        next_draw_id=next_draw_id,
        num_lost=next_draw_id - len(open_draws) - len(journal.steps()) * per_step,
        open_draws=open_draws,
    )


def rollout_extras(recipe: Recipe) -> Callable[[str], frozenset[str]]:
    """Members that groups have beside the siblings, by the draw's environment."""

    def of(environment: str) -> frozenset[str]:
        algo = recipe.algo_for.get(environment, recipe.algo)
        extras = {"greedy"} if algo.type == "remax" else set()
        if getattr(algo, "hindsight_coef", 0):
            extras.add("hindsight")
        return frozenset(extras)

    return of


def _check_relabel(recipe: Recipe, spec: EnvSpec) -> None:
    """Raise ConfigError when hindsight is asked of an environment that cannot give it."""
    extras = rollout_extras(recipe)
    members = spec.members if isinstance(spec, MixtureSpec) else {"": spec}
    for name, member in members.items():
        if "hindsight" in extras(name) and not hasattr(member, "relabel"):
            key = f"algo_for.{name}" if name in recipe.algo_for else "algo"
            raise ConfigError(
                f"environment {member.name} has no relabel(task, turns) and cannot say which task "
                f"an answer solves; leave out {key}.hindsight_coef"
            )


def _teaches(algorithm: Algorithm) -> Callable[[Group], bool]:
    return lambda group: not algorithm.credit([group], {}).dropped


def build_evaluator(
    recipe: Recipe, rollable: Rollable, learner: InlineLearner
) -> Evaluator | GivenEvaluator:
    """Held-out episodes with the recipe's own sampling block, or held-out given rows."""
    if rollable.runner is None:
        return GivenEvaluator(
            rollable.renderer,
            rollable.eval_tasks,
            recipe.eval.num_tasks,
            rollable.max_context,
            learner.judge,
        )
    return Evaluator(
        runner=rollable.runner,
        tasks=rollable.eval_tasks,
        params=eval_params(recipe),
        num_tasks=recipe.eval.num_tasks,
        samples_per_task=recipe.eval.samples_per_task,
        run_seed=recipe.seed,
        members=recipe.env.members if recipe.env and recipe.env.type == "mixture" else (),
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
    if isinstance(reward, MixtureReward) and isinstance(spec, MixtureSpec):
        for name, own in reward.rewards.items():
            await _prepare(own, spec.members[name])
        return
    prepare = getattr(reward, "prepare", None)
    if prepare is not None:
        outcome = prepare(list(getattr(spec, "columns", ())))
        if inspect.isawaitable(outcome):
            await outcome

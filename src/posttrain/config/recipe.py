"""A whole recipe. One default per knob, on its field; unknown keys are errors with the nearest
match."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from posttrain.config.algorithms import AlgoConfig
from posttrain.config.data import DataConfig
from posttrain.config.environments import EnvConfig
from posttrain.config.estimators import RlooConfig
from posttrain.config.model import ModelConfig, OptimConfig, SamplerConfig, SamplingConfig
from posttrain.config.policy_gradient import PolicyGradientConfig
from posttrain.config.section import Fraction, Positive, Section

Cluster = Literal["inline"]


class RolloutConfig(Section):
    """How much is drawn for a step, and what happens when part of it fails."""

    groups_per_step: Positive = Field(default=8, description="Tasks (or given rows) a step.")
    group_size: Positive = Field(default=8, description="Answers to each task.")
    refill: bool = Field(
        default=False,
        description="Draw on until groups_per_step groups carry a signal (dynamic sampling, "
        "arXiv:2503.14476).",
    )
    max_refill: Annotated[float, Field(ge=1)] = Field(
        default=4.0, description="Most groups drawn for a step, in multiples of groups_per_step."
    )
    max_turns: Positive = Field(default=1, description="Model calls of an episode, at most.")
    episode_timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=300.0,
        description="Seconds an episode's environment may take; the engine's time does not count.",
    )
    max_attempts: Positive = Field(
        default=2, description="Tries for an episode whose failure may pass."
    )
    overlong_prompt: Literal["error", "drop", "truncate_left"] = Field(
        default="error", description="A prompt that leaves no room for max_tokens in the context."
    )
    max_invalid_frac: Fraction = Field(
        default=0.5, description="Share of invalid episodes over a step above which the run stops."
    )


class EvalConfig(SamplingConfig):
    """Held-out evaluation, with its own sampling; `max_tokens` defaults to the sampler's."""

    max_tokens: Positive | None = Field(default=None, description="Default: the sampler's.")  # type: ignore[assignment]
    temperature: Annotated[float, Field(ge=0)] = Field(default=0.0, description="0 is greedy.")
    every: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Steps between; 0: ends only."
    )
    num_tasks: Positive = Field(default=200, description="Held-out tasks, the first ones.")
    samples_per_task: Positive = Field(default=1, description="Above 1 needs a temperature.")
    before: bool = Field(default=True, description="At step 0.")
    after: bool = Field(default=True, description="At the end.")

    @model_validator(mode="after")
    def _several_greedy_samples_are_one(self) -> EvalConfig:
        if self.temperature == 0 and self.samples_per_task > 1:
            raise ValueError(
                f"samples_per_task is {self.samples_per_task} at temperature 0: greedy samples are "
                "identical; set eval.temperature above 0 or samples_per_task = 1"
            )
        return self


class LearnerConfig(Section):
    """How the learner computes."""

    max_tokens_per_microbatch: Positive = Field(
        default=2048, description="Rows of one forward pass; less is less memory."
    )
    gradient_checkpointing: bool = Field(default=False, description="Less memory, more time.")


class CheckpointConfig(Section):
    """When the whole state is saved; between checkpoints the journal is redone."""

    every: Positive = Field(default=20, description="Steps between.")
    keep: Positive = Field(default=2, description="How many stay on disk.")


class ExpectConfig(Section):
    """What the recipe claims, checked by `make test-all`. Accuracies are greedy, held out."""

    accuracy_before_max: Fraction | None = Field(
        default=None, description="Most that the start may reach."
    )
    accuracy_after_min: Fraction | None = Field(
        default=None, description="Least that the end must reach."
    )
    wall_s_max: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="Most seconds of the whole run."
    )


class Recipe(Section):
    """A whole experiment."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w. -]*$", max_length=100)] = Field(
        description="Letters, digits, spaces, dots and dashes."
    )
    description: str = Field(default="", description="One line, for `posttrain recipes`.")
    seed: Annotated[int, Field(ge=0)] = Field(default=0, description="Of everything that is drawn.")
    num_steps: Positive = Field(
        default=100, description="Batches that are trained; the schedule of optim ends there."
    )
    max_policy_lag: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Most steps between sampling and training of a token."
    )
    cluster: Cluster = Field(default="inline", description="inline: one process.")
    deterministic: bool = Field(
        default=True,
        description="Bit-identical across runs and batch compositions on the same machine.",
    )
    threads: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        default=None, description="CPU threads; None: the cores allowed."
    )
    model: ModelConfig = Field(default_factory=ModelConfig)
    env: EnvConfig | None = None
    data: DataConfig | None = None
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    sampler: SamplerConfig = Field(default_factory=SamplerConfig)
    algo: AlgoConfig = Field(default_factory=RlooConfig)
    algo_for: dict[str, AlgoConfig] = Field(
        default_factory=dict, description="Algorithms of single members of an environment mixture."
    )
    optim: OptimConfig = Field(default_factory=OptimConfig)
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    expect: ExpectConfig | None = None

    @model_validator(mode="after")
    def _batch_is_cut_evenly(self) -> Recipe:
        groups, minibatches = self.rollout.groups_per_step, self.algo.num_minibatches
        if groups % minibatches:
            raise ValueError(
                f"rollout.groups_per_step {groups} does not divide by algo.num_minibatches "
                f"{minibatches}; change one of them"
            )
        if not self.rollout.refill:
            self.rollout.refuse_without_effect(["max_refill"], "without refill")
        elif self.data is not None:
            raise ValueError(
                "rollout.refill has no effect with [data]: given rows are drawn as they are; "
                "leave it out"
            )
        return self

    @model_validator(mode="after")
    def _games_can_be_finished(self) -> Recipe:
        members = self.env.members.values() if self.env and self.env.type == "mixture" else ()
        for env in members or (self.env,):
            if env and env.type == "binary_search" and self.rollout.max_turns < env.max_guesses:
                raise ValueError(
                    f"rollout.max_turns {self.rollout.max_turns} is below env.max_guesses "
                    f"{env.max_guesses}; raise it so that every guess can be made"
                )
        return self

    @model_validator(mode="after")
    def _algorithm_has_what_it_reads(self) -> Recipe:
        for name, algo in self._all_algos().items():
            self._check_source(name, algo)
        return self

    def _all_algos(self) -> dict[str, AlgoConfig]:
        return {"algo": self.algo} | {f"algo_for.{n}": a for n, a in self.algo_for.items()}

    def _check_source(self, name: str, algo: AlgoConfig) -> None:
        given = self.data.type if self.data else None
        if self.env is None and given is None:
            raise ValueError("a recipe needs [env], or [data] for an algorithm that reads it")
        fitting = {"rollouts": (None,), "demonstrations": ("demonstrations",)}
        if given not in fitting.get(algo.needs, (None, "pairs")):
            raise ValueError(
                f"{name}.type {algo.type!r} learns from {algo.needs}, and [data] is "
                f"{given or 'missing'}: give the data it reads, or another algorithm"
            )
        if given is None:
            self._check_group_size(name, algo)

    def _check_group_size(self, name: str, algo: AlgoConfig) -> None:
        size, smallest = self.rollout.group_size, getattr(algo, "min_group_size", 1)
        if size < smallest:
            raise ValueError(
                f"rollout.group_size is {size}: {name}.type {algo.type!r} compares the members of "
                f"a group, and a single one has nothing to be compared with; use {smallest} or "
                "more, or an algorithm that is defined for one (reinforce, reinforce_pp, remax, "
                "rae, gae)"
            )

    @model_validator(mode="after")
    def _algorithms_of_members_fit_together(self) -> Recipe:
        members = self.env.members if self.env and self.env.type == "mixture" else {}
        for name, algo in self.algo_for.items():
            if name not in members:
                raise ValueError(
                    f"algo_for names {name!r}, which is no member of an environment mixture"
                    + (f"; members are {', '.join(members)}" if members else "")
                )
            for key in ("num_minibatches", "num_epochs"):
                if getattr(algo, key) != getattr(self.algo, key):
                    raise ValueError(
                        f"algo_for.{name}.{key} is {getattr(algo, key)} and algo.{key} is "
                        f"{getattr(self.algo, key)}: one batch is cut in one way; set both alike"
                    )
        for key in ("teacher", "critic"):
            having = {n: getattr(a, key) for n, a in self._all_algos().items() if hasattr(a, key)}
            if any(value != next(iter(having.values())) for value in having.values()):
                raise ValueError(
                    f"{' and '.join(f'{name}.{key}' for name in having)} differ: a run has one "
                    f"{key}; set them alike"
                )
        return self

    @model_validator(mode="after")
    def _one_model_serves_all(self) -> Recipe:
        """A run has one scalar head, and one measure of the distance from one teacher."""
        if not self.algo_for:
            return self
        if self.data is not None:
            raise ValueError(
                "algo_for has no effect with [data]: its rows belong to no member; leave it out"
            )
        algos = self._all_algos()
        measures: set[tuple[str, float]] = set()
        for name, algo in algos.items():
            if algo.type == "reward_model":
                raise ValueError(
                    f"{name}.type is 'reward_model', beside other algorithms in algo_for: a reward "
                    "model is trained alone; give it a recipe of its own"
                )
            if algo.type == "distill" and algo.divergence != "sampled":
                measures.add((algo.divergence, algo.beta))
        if len(measures) > 1:
            raise ValueError(
                f"algo and algo_for measure {' and '.join(m for m, _ in sorted(measures))}: a run "
                "has one divergence from its teacher; set divergence and beta alike"
            )
        return self

    @model_validator(mode="after")
    def _rows_are_held_out_for_something(self) -> Recipe:
        if self.data is not None:
            self.sampler.refuse_without_effect(
                ["temperature"], "with [data]: given answers are scored as they are"
            )
        if self.data is not None:
            self.rollout.refuse_without_effect(["group_size"], "with [data]: rows are given")
        if self.data is not None and self.env is None:
            self._refuse_what_only_episodes_read()
        if self.data is not None and self.env is not None:
            self.data.refuse_without_effect(
                ["eval_path", "eval_frac", "num_eval"],
                "with [env], which evaluates: every row trains",
            )
        return self

    def _refuse_what_only_episodes_read(self) -> None:
        why = "without [env]: nothing is generated"
        self.rollout.refuse_without_effect(
            ["max_turns", "episode_timeout_s", "max_attempts", "overlong_prompt"], why
        )
        self.sampler.refuse_without_effect(["max_tokens", "stop"], why)
        self.eval.refuse_without_effect(
            ["max_tokens", "temperature", "top_p", "top_k", "stop", "samples_per_task"], why
        )
        self.refuse_without_effect(["max_policy_lag"], why)

    @model_validator(mode="after")
    def _refill_has_something_to_replace(self) -> Recipe:
        drops = any(_drops_groups(algo) for algo in self._all_algos().values())
        if self.rollout.refill and not drops:
            raise ValueError(
                "rollout.refill draws again for groups that carry no signal, and algo.type "
                f"{self.algo.type!r} uses every group; leave refill out, or use an estimator with "
                'a group baseline and zero_variance = "drop"'
            )
        return self

    @model_validator(mode="after")
    def _reference_can_move(self) -> Recipe:
        moving = [
            name
            for name, algo in self._all_algos().items()
            if (kl := getattr(algo, "kl", None)) and (kl.reset_every or kl.sync_every)
        ]
        if moving and getattr(self.model, "lora", None) is not None:
            raise ValueError(
                f"{moving[0]}.kl moves its reference, which with model.lora is the frozen base "
                "model; leave out reset_every and sync_every"
            )
        if [name for name in moving if name != "algo"]:
            raise ValueError(f"{moving[-1]}.kl moves the run's one reference: set it in algo.kl")
        return self

    @property
    def eval_max_tokens(self) -> int:
        return self.eval.max_tokens or self.sampler.max_tokens


def _drops_groups(algo: AlgoConfig) -> bool:
    """Whether a group may carry no sample for want of a signal."""
    if isinstance(algo, PolicyGradientConfig):
        return algo.drops_flat_groups
    return True


def default_threads() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cache_dir() -> Path:
    """Where models are kept: $POSTTRAIN_CACHE, else the user's cache folder."""
    explicit = os.environ.get("POSTTRAIN_CACHE")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "posttrain"

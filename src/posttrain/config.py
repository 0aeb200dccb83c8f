"""Recipes: frozen pydantic models, TOML in, overrides on top. Imports nothing heavy.

One default per knob, on its field. Unknown keys are errors with the nearest match.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Cluster = Literal["inline"]
Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Example = Annotated[tuple[str, str], Field(strict=False)]


class Section(BaseModel):
    """Base of every part of a recipe: frozen, strict about names and types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def refuse_without_effect(self, names: Sequence[str], why: str) -> None:
        """Raise ValueError for a setting that was changed but would be ignored."""
        for name in names:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no effect {why}; leave it out")


# --- model, sampler, optimizer ------------------------------------------------------------------


class ModelConfig(Section):
    """The policy: a name from `posttrain models` or the path of a Hugging Face folder."""

    path: str = "smollm2-135m-instruct"
    dtype: Literal["bfloat16", "float32"] = Field(
        default="bfloat16",
        description="Compute type. Masters and AdamW states are fp32 either way.",
    )
    attention: Literal["exact", "sdpa"] = Field(
        default="exact",
        description="exact: sampler and learner compute the same bits; sdpa: torch's fused kernel.",
    )
    max_context: Positive | None = Field(
        default=None,
        description="Longest prompt plus completion in tokens; default: the model's own.",
    )


class SamplingConfig(Section):
    """How completions are drawn."""

    max_tokens: Positive = 64
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(default=(), strict=False)

    @model_validator(mode="after")
    def _temperature_is_usable(self) -> SamplingConfig:
        if 0 < self.temperature < 1e-3:
            raise ValueError(
                f"temperature is {self.temperature}; use 0 for greedy or a value >= 0.001"
            )
        return self


class SamplerConfig(SamplingConfig):
    """The rollout engine and its sampling for training."""

    type: Literal["embedded"] = "embedded"
    max_batch: Positive = Field(default=64, description="Most sequences that decode together.")

    @model_validator(mode="after")
    def _training_distribution_is_full(self) -> SamplerConfig:
        if self.top_p != 1.0:
            raise ValueError(
                f"top_p is {self.top_p}: training needs top_p = 1, because the learner's log-probs "
                "are over the full vocabulary and the ratio would be biased by the kept mass; "
                "set top_p under [eval] if you want it for evaluation"
            )
        if self.top_k != 0:
            raise ValueError(
                f"top_k is {self.top_k}: training needs top_k = 0, because the learner's log-probs "
                "are over the full vocabulary; set top_k under [eval] for evaluation"
            )
        if self.temperature == 0:
            raise ValueError(
                "temperature is 0: greedy siblings are all equal and teach nothing; "
                "use 1.0 for training and temperature = 0 under [eval]"
            )
        return self


class OptimConfig(Section):
    """AdamW on fp32 masters, with linear warm-up and a schedule down to `min_lr_frac`."""

    lr: Annotated[float, Field(gt=0)] = 1e-5
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    min_lr_frac: Fraction = 0.0
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    max_skipped_steps: Positive = Field(
        default=3, description="Consecutive non-finite steps before the run stops with a diagnosis."
    )

    @model_validator(mode="after")
    def _decay_has_a_schedule(self) -> OptimConfig:
        if self.schedule == "constant":
            self.refuse_without_effect(["min_lr_frac"], 'with schedule = "constant"')
        return self


# --- algorithms ---------------------------------------------------------------------------------


class _PolicyGradient(Section):
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    aggregation: Literal[
        "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "fixed_length"
    ] = "token_mean"
    fixed_length: Positive | None = Field(
        default=None, description="Denominator of the fixed_length aggregation, in tokens."
    )
    num_minibatches: Positive = Field(default=1, description="Optimizer steps a batch is cut into.")
    num_epochs: Positive = Field(default=1, description="Passes over each batch.")
    zero_variance: Literal["drop", "keep"] = Field(
        default="drop",
        description="drop: out of the loss and its denominators; keep: counted, A = 0.",
    )
    truncated: Literal["score", "mask"] = Field(
        default="score",
        description="mask: truncated trajectories leave loss, denominators and baseline.",
    )

    @model_validator(mode="after")
    def _fixed_length_goes_with_its_aggregation(self) -> _PolicyGradient:
        if (self.aggregation == "fixed_length") != (self.fixed_length is not None):
            raise ValueError(
                f"aggregation is {self.aggregation!r} and fixed_length is {self.fixed_length}: "
                'set both (aggregation = "fixed_length", fixed_length = TOKENS) or neither'
            )
        return self


class RlooConfig(_PolicyGradient):
    """Leave-one-out baseline (arXiv:2402.14740) with PPO clipping."""

    type: Literal["rloo"] = "rloo"


class GrpoConfig(_PolicyGradient):
    """Group-mean baseline, optionally divided by a standard deviation (arXiv:2402.03300)."""

    type: Literal["grpo"] = "grpo"
    std: Literal["group", "batch", "none"] = "group"
    std_eps: Annotated[float, Field(gt=0)] = 1e-6

    @model_validator(mode="after")
    def _eps_has_a_std(self) -> GrpoConfig:
        if self.std == "none":
            self.refuse_without_effect(["std_eps"], 'with std = "none"')
        return self


AlgoConfig = Annotated[RlooConfig | GrpoConfig, Field(discriminator="type")]


# --- environments -------------------------------------------------------------------------------


class _EnvSection(Section):
    system: str | None = Field(
        default=None, description="System message; None leaves it to the template."
    )
    examples: tuple[Example, ...] = Field(
        default=(),
        strict=False,
        description="Questions and answers shown as earlier turns, for models that need to see "
        "the form of an answer.",
    )
    num_eval: Positive = Field(default=200, description="Held-out tasks.")


class ArithmeticConfig(_EnvSection):
    """Integer arithmetic, made on the spot; held-out problems never occur in training."""

    type: Literal["arithmetic"] = "arithmetic"
    operations: tuple[Literal["+", "-", "*"], ...] = Field(
        default=("+",), strict=False, min_length=1
    )
    min_operand: int = 0
    max_operand: int = 99
    prompt: str = "{a} {op} {b} = ?"
    num_train: Positive | None = Field(
        default=None, description="Training problems; None: all others."
    )

    @model_validator(mode="after")
    def _range_holds_problems(self) -> ArithmeticConfig:
        if self.max_operand < self.min_operand:
            raise ValueError(
                f"max_operand {self.max_operand} is below min_operand {self.min_operand}"
            )
        return self


class LargestConfig(_EnvSection):
    """Name the largest of several different numbers."""

    type: Literal["largest"] = "largest"
    count: Annotated[int, Field(ge=2)] = 4
    min_number: Annotated[int, Field(ge=0)] = 0
    max_number: Positive = 99
    prompt: str = "Largest: {numbers}"
    num_train: Positive = 100_000

    @model_validator(mode="after")
    def _range_holds_numbers(self) -> LargestConfig:
        if self.count > self.max_number - self.min_number:
            raise ValueError(
                f"{self.min_number}..{self.max_number} leaves no choice of {self.count} different "
                "numbers; widen the range"
            )
        return self


class ReverseConfig(_EnvSection):
    """Reverse a short string; reward is the fraction of right characters."""

    type: Literal["reverse"] = "reverse"
    alphabet: str = "abcd"
    length: Positive = 3
    num_eval: Positive = Field(default=16, description="Held-out strings, at most half of all.")


class BinarySearchConfig(_EnvSection):
    """Find a hidden number by guessing; the environment answers higher, lower or correct."""

    type: Literal["binary_search"] = "binary_search"
    low: int = 1
    high: int = 7
    max_guesses: Positive = 3
    terse: bool = Field(
        default=False, description="Observations of one character, for tiny models."
    )

    @model_validator(mode="after")
    def _range_is_a_range(self) -> BinarySearchConfig:
        if self.high <= self.low:
            raise ValueError(f"high {self.high} must be above low {self.low}")
        return self


class ReasoningGymConfig(_EnvSection):
    """Any reasoning-gym dataset by name, or a composite of several."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str | None = None
    params: dict[str, Any] = Field(default_factory=dict)
    composite: tuple[dict[str, Any], ...] = Field(default=(), strict=False)
    size: Positive = Field(default=1000, description="Training tasks that are generated.")
    prompt_suffix: str = ""

    @model_validator(mode="after")
    def _one_source(self) -> ReasoningGymConfig:
        if (self.dataset is None) == (not self.composite):
            raise ValueError("set exactly one of dataset and composite")
        return self


class DatasetConfig(_EnvSection):
    """The user's own rows and reward function.

    `reward` is "math", "exact", or "FILE.py:FUNCTION" / "package.module:FUNCTION". The function's
    parameters name what it needs: `completion`, `prompt`, `task`, and any column of the data.
    """

    type: Literal["dataset"] = "dataset"
    path: str
    reward: str
    prompt: str = Field(
        default="prompt", description="Column with a string or a list of chat messages."
    )
    answer: str = Field(
        default="answer", description='Column of the gold answer, for "math", "exact".'
    )
    id_column: str | None = None
    template: str | None = Field(
        default=None, description='For instance "{question}\\nThink, then answer."'
    )
    split: str = "train"
    eval_path: str | None = None
    eval_frac: Annotated[float, Field(gt=0, lt=1)] = 0.1
    reward_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    reward_workers: Positive = Field(default=1, description="Grader processes.")
    correct_at: float = Field(
        default=1.0, description="Reward from which a sample counts as correct."
    )

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> DatasetConfig:
        if self.template is not None:
            self.refuse_without_effect(["prompt"], "with template, which makes the prompt")
        if self.eval_path is not None:
            self.refuse_without_effect(["eval_frac"], "with eval_path")
        if self.reward in ("math", "exact"):
            self.refuse_without_effect(["correct_at"], f'with reward = "{self.reward}"')
        else:
            self.refuse_without_effect(["answer"], "with a reward function: it names columns")
        if self.reward == "exact":
            self.refuse_without_effect(
                ["reward_timeout_s", "reward_workers"], "on a comparison without a process"
            )
        return self


class PythonEnvConfig(_EnvSection):
    """An environment of the user's: "FILE.py:NAME" or "package.module:NAME", a class or function
    that is called with `params` and gives an object with the methods of `protocols.EnvSpec`."""

    type: Literal["python"] = "python"
    target: str
    params: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _prompts_are_its_own(self) -> PythonEnvConfig:
        self.refuse_without_effect(
            ["system", "examples", "num_eval"],
            "on a python environment, which makes its own tasks: pass it in params if it takes one",
        )
        return self


EnvConfig = Annotated[
    ArithmeticConfig
    | LargestConfig
    | ReverseConfig
    | BinarySearchConfig
    | ReasoningGymConfig
    | DatasetConfig
    | PythonEnvConfig,
    Field(discriminator="type"),
]


# --- the rest -----------------------------------------------------------------------------------


class RolloutConfig(Section):
    """How much is drawn for a step, and what happens when part of it fails."""

    groups_per_step: Positive = 8
    group_size: Annotated[int, Field(ge=2)] = 8
    max_turns: Positive = 1
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

    max_tokens: Positive | None = None  # type: ignore[assignment]
    temperature: Annotated[float, Field(ge=0)] = 0.0
    every: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Steps between; 0: ends only."
    )
    num_tasks: Positive = 200
    samples_per_task: Positive = 1
    before: bool = True
    after: bool = True

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

    max_tokens_per_microbatch: Positive = 2048
    gradient_checkpointing: bool = False


class CheckpointConfig(Section):
    """When the whole state is saved; between checkpoints the journal is redone."""

    every: Positive = 20
    keep: Positive = 2


class ExpectConfig(Section):
    """What the recipe claims, checked by `make test-all`. Accuracies are greedy, held out."""

    accuracy_before_max: Fraction | None = None
    accuracy_after_min: Fraction | None = None
    wall_s_max: Annotated[float, Field(gt=0)] | None = None


class Recipe(Section):
    """A whole experiment."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w. -]*$", max_length=100)]
    description: str = ""
    seed: Annotated[int, Field(ge=0)] = 0
    num_steps: Positive = 100
    max_policy_lag: Annotated[int, Field(ge=0)] = 0
    cluster: Cluster = "inline"
    deterministic: bool = Field(
        default=True,
        description="Bit-identical across runs and batch compositions on the same machine.",
    )
    threads: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        default=None, description="CPU threads; None: the cores allowed."
    )
    model: ModelConfig = Field(default_factory=ModelConfig)
    env: EnvConfig
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    sampler: SamplerConfig = Field(default_factory=SamplerConfig)
    algo: AlgoConfig = Field(default_factory=RlooConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    expect: ExpectConfig | None = None

    @model_validator(mode="after")
    def _parts_agree(self) -> Recipe:
        groups, minibatches = self.rollout.groups_per_step, self.algo.num_minibatches
        if groups % minibatches:
            raise ValueError(
                f"rollout.groups_per_step {groups} does not divide by algo.num_minibatches "
                f"{minibatches}; change one of them"
            )
        if self.env.type == "binary_search" and self.rollout.max_turns < self.env.max_guesses:
            raise ValueError(
                f"rollout.max_turns {self.rollout.max_turns} is below env.max_guesses "
                f"{self.env.max_guesses}; raise it so that every guess can be made"
            )
        return self

    @property
    def eval_max_tokens(self) -> int:
        return self.eval.max_tokens or self.sampler.max_tokens


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

"""The policy, how it samples, and its optimizer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from posttrain.config.section import Fraction, Positive, Section

ModuleName = Annotated[str, Field(min_length=1)]


class LoraConfig(Section):
    """Train a low-rank adapter (arXiv:2106.09685) and leave the model's own weights alone.

    There is no dropout: sampler and learner must be the same function.
    """

    rank: Positive = Field(default=16, description="Of the two matrices of each layer.")
    alpha: Positive = Field(default=32, description="The update is multiplied by alpha / rank.")
    target_modules: (
        Literal["all-linear"] | Annotated[tuple[ModuleName, ...], Field(strict=False)]
    ) = Field(
        default="all-linear",
        description="Layers to adapt: all but the output head, or ends of their names.",
    )
    rslora: bool = Field(default=False, description="Multiply by alpha / sqrt(rank) instead.")
    train_also: tuple[ModuleName, ...] = Field(
        default=(), strict=False, description="Modules to train whole, by the ends of their names."
    )

    @field_validator("target_modules", mode="before")
    @classmethod
    def _targets_are_a_list(cls, value: object) -> object:
        if value != "all-linear" and (not isinstance(value, list | tuple) or not value):
            raise ValueError(
                f'target_modules is {value!r}; write "all-linear" or a list of names such as '
                '["q_proj", "v_proj"]'
            )
        return value


class ModelConfig(Section):
    """The policy: a name from `posttrain models` or the path of a Hugging Face folder."""

    path: str = Field(
        default="smollm2-135m-instruct",
        description="Known name, folder, hub id, or recipe:NAME for what a recipe trains.",
    )
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
    lora: LoraConfig | None = Field(
        default=None, description="Train an adapter; left out: train every weight."
    )


class SamplingConfig(Section):
    """How completions are drawn."""

    max_tokens: Positive = Field(default=64, description="Of one model call.")
    temperature: Annotated[float, Field(ge=0)] = Field(
        default=1.0, description="Divides the logits."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="Smallest set of tokens with this mass; 1: all."
    )
    top_k: Annotated[int, Field(ge=0)] = Field(default=0, description="Most likely tokens; 0: all.")
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), strict=False, description="Texts that end an answer."
    )

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
    kv_tokens: Positive | None = Field(
        default=None,
        description="Tokens whose keys and values are held; what does not fit waits. Default: "
        "max_batch whole contexts, or a quarter of the memory if that is less.",
    )

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

    lr: Annotated[float, Field(gt=0)] = Field(
        default=1e-5, description="Largest rate of the schedule."
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Over num_steps, after the warm-up."
    )
    warmup_steps: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Steps of a linear rise."
    )
    min_lr_frac: Fraction = Field(
        default=0.0, description="Share of lr at the end of the schedule."
    )
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.9, description="Decay of the mean of gradients."
    )
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.99, description="Decay of the mean of their squares."
    )
    eps: Annotated[float, Field(gt=0)] = Field(
        default=1e-8, description="Added to the root of the latter."
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="Decoupled from the gradient."
    )
    max_grad_norm: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="The gradient is scaled down to this norm."
    )
    max_skipped_steps: Positive = Field(
        default=3, description="Consecutive non-finite steps before the run stops with a diagnosis."
    )

    @model_validator(mode="after")
    def _decay_has_a_schedule(self) -> OptimConfig:
        if self.schedule == "constant":
            self.refuse_without_effect(["min_lr_frac"], 'with schedule = "constant"')
        return self

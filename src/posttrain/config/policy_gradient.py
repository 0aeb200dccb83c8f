"""What every policy-gradient algorithm shares; `estimators` adds the keys of each."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from posttrain.config.corrections import CorrectionConfig, TisConfig
from posttrain.config.losses import Aggregation, LossConfig, PpoClipConfig
from posttrain.config.regularisers import EntropyConfig, KlConfig
from posttrain.config.section import NonNegative, Positive, Section
from posttrain.config.shaping import ShapingConfig


def by_name(value: Any) -> Any:
    """`loss = "gspo"` is short for `loss = {type = "gspo"}`."""
    return {"type": value} if isinstance(value, str) else value


def each_by_name(values: Any) -> Any:
    """`by_name` for each of a list."""
    return [by_name(v) for v in values] if isinstance(values, list | tuple) else values


class UpdateConfig(Section):
    """How a batch becomes optimizer steps."""

    num_minibatches: Positive = Field(default=1, description="Optimizer steps a batch is cut into.")
    num_epochs: Positive = Field(default=1, description="Passes over each batch.")


class PolicyGradientConfig(UpdateConfig):
    """Loss, aggregation, off-policy correction, regularisers, shaping and filters."""

    needs: ClassVar[str] = "rollouts"
    min_group_size: ClassVar[int] = 2
    equal_rewards_teach: ClassVar[bool] = False
    has_critic: ClassVar[bool] = False

    loss: Annotated[LossConfig, BeforeValidator(by_name)] = Field(default_factory=PpoClipConfig)
    aggregation: Aggregation | None = Field(
        default=None, description="Default: the loss's own, token_mean for most."
    )
    fixed_length: Positive | None = Field(
        default=None, description="Denominator of the fixed_length aggregation, in tokens."
    )
    anchor: Literal["prox", "sampler", "loglinear"] = Field(
        default="prox",
        description="Policy that ratios are taken against: recomputed at the start of the step "
        "(decoupled PPO), the sampler's (bypass), or an interpolation without a forward pass.",
    )
    corrections: Annotated[tuple[CorrectionConfig, ...] | None, BeforeValidator(each_by_name)] = (
        Field(
            default=None,
            strict=False,
            description="Weights and masks for prox over sampler; default: tis, or none where the "
            "loss or the anchor has the sampler's ratio already.",
        )
    )
    kl: KlConfig | None = None
    entropy: EntropyConfig | None = None
    shaping: Annotated[tuple[ShapingConfig, ...], BeforeValidator(each_by_name)] = Field(
        default=(), strict=False, description="Changes to rewards before any statistic."
    )
    positive_nll_coef: NonNegative = Field(
        default=0.0, description="Weight of imitating correct trajectories (VAPO has 0.1)."
    )
    hindsight_coef: NonNegative = Field(
        default=0.0,
        description="Weight of imitating answers under the task that they do solve, for "
        "environments that can name one.",
    )
    zero_variance: Literal["drop", "drop_same_correct", "keep"] = Field(
        default="drop",
        description="drop: groups of equal rewards leave the loss and its denominators; "
        "drop_same_correct: those in which all or none are correct (arXiv:2503.14476), whatever "
        "else the reward holds; keep: counted, A = 0, as always with KL in the reward.",
    )
    truncated: Literal["score", "mask"] = Field(
        default="score",
        description="mask: truncated trajectories leave loss, denominators and baseline.",
    )

    @model_validator(mode="after")
    def _fixed_length_goes_with_its_aggregation(self) -> PolicyGradientConfig:
        if (self.aggregation == "fixed_length") != (self.fixed_length is not None):
            raise ValueError(
                f"aggregation is {self.aggregation!r} and fixed_length is {self.fixed_length}: "
                'set both (aggregation = "fixed_length", fixed_length = TOKENS) or neither'
            )
        return self

    @model_validator(mode="after")
    def _aggregation_goes_with_the_loss(self) -> PolicyGradientConfig:
        if self.aggregation not in (None, *self.loss.aggregations):
            raise ValueError(
                f"aggregation is {self.aggregation!r}, but the ratio of loss {self.loss.type!r} "
                "belongs to a whole sequence: weighed by tokens it would favour long answers; "
                f"use {' or '.join(map(repr, self.loss.aggregations))}, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _anchor_is_read(self) -> PolicyGradientConfig:
        if not self.loss.reads_anchor:
            self.refuse_without_effect(
                ["anchor"], f"on loss {self.loss.type!r}, which never reads it"
            )
        return self

    @property
    def drops_flat_groups(self) -> bool:
        """Whether a group of equal rewards may leave the loss. With KL in the reward it has
        something to say whatever its rewards are."""
        kl_in_reward = self.kl is not None and self.kl.place == "reward"
        return not (self.equal_rewards_teach or kl_in_reward or self.zero_variance == "keep")

    @property
    def weighs_by_sampler(self) -> str | None:
        """What already weighs by policy or prox over sampler, if anything does."""
        if self.anchor == "sampler" and self.loss.has_ratio:
            return 'anchor = "sampler"'
        return f"loss {self.loss.type!r}" if self.loss.anchor_is_sampler else None

    @model_validator(mode="after")
    def _sampler_is_counted_once(self) -> PolicyGradientConfig:
        weights = [c.type for c in self.corrections or () if c.is_weight]
        if weights and self.weighs_by_sampler:
            raise ValueError(
                f"{self.weighs_by_sampler} already weighs by the sampler's probabilities, and "
                f"corrections {weights} would do so again; leave out the weights (masks may stay)"
            )
        if len(weights) > 1:
            raise ValueError(
                f"corrections {weights} each weigh by prox / sampler, together by its square; keep "
                "one of them (masks may be added)"
            )
        return self

    @property
    def effective_aggregation(self) -> Aggregation:
        """The aggregation in force."""
        return self.aggregation or self.loss.aggregations[0]

    @property
    def effective_corrections(self) -> tuple[CorrectionConfig, ...]:
        """The corrections in force."""
        if self.corrections is not None:
            return self.corrections
        return () if self.weighs_by_sampler else (TisConfig(),)

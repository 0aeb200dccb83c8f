"""KL to a reference policy, and entropy."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from posttrain.config.section import NonNegative, Positive, PositiveFloat, Section


class KlConfig(Section):
    """Keeps the policy near a reference, by default the model that the run began with."""

    place: Literal["reward", "loss"] = Field(
        default="reward",
        description="reward: k1 to go is subtracted from the advantage, the full gradient of "
        "KL(policy || reference); loss: `estimator` is added to the loss of each token.",
    )
    estimator: Literal["k1", "k2", "k3", "k3_weighted"] = Field(
        default="k1",
        description="In the loss k2 and k3_weighted have the gradient of KL(policy || reference), "
        "k3 that of KL(reference || policy), k1 none (refused).",
    )
    coef: PositiveFloat = 0.01
    only: Literal["all", "top_covariance"] = Field(
        default="all",
        description="top_covariance: only the tokens that make the entropy fall most "
        "(KL-Cov, arXiv:2505.22617).",
    )
    top_frac: Annotated[float, Field(gt=0, le=1)] = Field(
        default=2e-4, description="Share of a step's tokens that top_covariance selects."
    )
    target: PositiveFloat | None = Field(
        default=None, description="Adapts coef towards this KL per token (arXiv:1909.08593)."
    )
    horizon: Positive = Field(default=10_000, description="Of the adaptation, in sequences.")
    reset_every: Positive | None = Field(
        default=None, description="Steps after which the reference becomes the current policy."
    )
    sync_every: Positive | None = Field(
        default=None, description="Steps after which the reference moves towards the policy."
    )
    sync_mix: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.6, description="Share of the policy in that move."
    )

    @model_validator(mode="after")
    def _estimator_has_the_right_gradient(self) -> KlConfig:
        if self.place == "reward" and self.estimator != "k1":
            raise ValueError(
                f"estimator is {self.estimator!r} in the reward: there only k1 has the gradient of "
                'KL(policy || reference); use estimator = "k1" or place = "loss"'
            )
        if self.place == "loss" and self.estimator == "k1":
            raise ValueError(
                "estimator k1 in the loss has an expected gradient of 0 and only adds noise; use "
                'place = "reward", or estimator "k2" or "k3_weighted"'
            )
        return self

    @model_validator(mode="after")
    def _tokens_are_selected_in_the_loss(self) -> KlConfig:
        if self.only == "all":
            self.refuse_without_effect(["top_frac"], 'with only = "all"')
        elif self.place == "reward":
            raise ValueError(
                f"only is {self.only!r} with the KL in the reward: a token is selected by its "
                'advantage, which would hold that KL already; use place = "loss" (estimator "k2")'
            )
        return self

    @model_validator(mode="after")
    def _adaptation_and_reference_have_an_effect(self) -> KlConfig:
        if self.target is None:
            self.refuse_without_effect(["horizon"], "without target")
        if self.sync_every is None:
            self.refuse_without_effect(["sync_mix"], "without sync_every")
        elif self.reset_every is not None:
            raise ValueError("reset_every and sync_every both move the reference; set one")
        return self


class EntropyConfig(Section):
    """A bonus for entropy, in nats per token."""

    coef: NonNegative
    target: PositiveFloat | None = Field(
        default=None, description="The bonus acts only while the mean entropy is at most this."
    )

    @model_validator(mode="after")
    def _bonus_has_an_effect(self) -> EntropyConfig:
        if self.coef == 0:
            raise ValueError(
                "coef is 0: the entropy section has no effect; set coef (for instance 0.001) or "
                "leave the section out"
            )
        return self

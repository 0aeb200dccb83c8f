"""Reward shaping: one class each, named as the function in `algo/shaping/`.

The fields are the function's keyword-only arguments. Lengths are sampled tokens of a trajectory:
the budget of generation, without the prompt.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from posttrain.config.section import Positive, PositiveFloat, Section


class SoftOverlongConfig(Section):
    """A penalty that grows to -1 over the last tokens of the budget (arXiv:2503.14476 eq. 13)."""

    type: Literal["soft_overlong"] = "soft_overlong"
    max_length: Positive
    cache_length: Positive

    @model_validator(mode="after")
    def _penalty_begins_within_the_budget(self) -> SoftOverlongConfig:
        if self.cache_length > self.max_length:
            raise ValueError(
                f"cache_length is {self.cache_length} and max_length is {self.max_length}: the "
                "penalty would begin below 0 tokens; lower cache_length to max_length or less"
            )
        return self


class KimiLengthConfig(Section):
    """Rewards the shorter answers of a group (arXiv:2501.12599 section 2.3.3)."""

    type: Literal["kimi_length"] = "kimi_length"
    coef: PositiveFloat = Field(default=0.25, description="From the shortest to the longest.")


class LinearLengthConfig(Section):
    """A penalty by length, scaled by the group's pass rate (prime-rl)."""

    type: Literal["linear_length"] = "linear_length"
    coef: PositiveFloat = Field(default=0.25, description="Of the longest when all are correct.")


class CosineLengthConfig(Section):
    """A reward by length in place of the outcome (arXiv:2502.03373)."""

    type: Literal["cosine_length"] = "cosine_length"
    max_length: Positive
    correct_short: float = 2.0
    correct_long: float = 1.0
    wrong_short: float = -10.0
    wrong_long: float = 0.0
    exceed: float = Field(default=-10.0, description="Of more than max_length tokens.")

    @model_validator(mode="after")
    def _right_is_worth_more_than_wrong(self) -> CosineLengthConfig:
        least = min(self.correct_short, self.correct_long)
        most = max(self.wrong_short, self.wrong_long, self.exceed)
        if most >= least:
            raise ValueError(
                f"a correct answer may get {least} and a wrong or overlong one {most}: the policy "
                "would learn to be wrong; keep wrong_* and exceed below correct_*"
            )
        return self


class MultiplicativeLengthConfig(Section):
    """Discounts correct answers by gamma for each reference_length tokens."""

    type: Literal["multiplicative_length"] = "multiplicative_length"
    gamma: Annotated[float, Field(gt=0, lt=1)] = 0.9
    reference_length: Positive


class RepetitionConfig(Section):
    """A penalty by the share of n-grams that were said before (arXiv:2502.03373 appendix C.2)."""

    type: Literal["repetition"] = "repetition"
    ngram: Positive = Field(default=20, description="Tokens of an n-gram.")
    coef: PositiveFloat = Field(default=1.0, description="Of an answer that only repeats.")


ShapingConfig = Annotated[
    SoftOverlongConfig
    | KimiLengthConfig
    | LinearLengthConfig
    | CosineLengthConfig
    | MultiplicativeLengthConfig
    | RepetitionConfig,
    Field(discriminator="type"),
]

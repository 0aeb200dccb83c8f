"""Off-policy corrections: one class each, named as the function in `algo/corrections/`.

The fields are the function's keyword-only arguments. `is_weight` says whether it weighs by
prox / sampler (True) or only keeps and drops (False); `whole_step` whether it selects among all
tokens of the step and not within each sequence.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from posttrain.config.section import NonNegative, PositiveFloat, Section

# Without drift every ratio is 1: bounds that exclude it would reweigh or drop on-policy data.
AtLeastOne = Annotated[float, Field(ge=1)]
AtMostOne = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]


class CorrectionSection(Section):
    """Base of every correction."""

    is_weight: ClassVar[bool] = False
    whole_step: ClassVar[bool] = False


class TisConfig(CorrectionSection):
    """Truncated importance weight of each token, min(prox / sampler, cap)."""

    is_weight: ClassVar[bool] = True
    type: Literal["tis"] = "tis"
    cap: AtLeastOne = 2.0
    floor: AtMostOne = 0.0


class IcepopConfig(CorrectionSection):
    """Importance weight of each token, 0 outside the band (arXiv:2510.18855)."""

    is_weight: ClassVar[bool] = True
    type: Literal["icepop"] = "icepop"
    low: AtMostOne = 0.5
    high: AtLeastOne = 5.0


class TokenMaskConfig(CorrectionSection):
    """Drops tokens whose ratio is outside the band."""

    type: Literal["token_mask"] = "token_mask"
    low: AtMostOne = 0.5
    high: AtLeastOne = 2.0


class SeqTisConfig(CorrectionSection):
    """Truncated importance weight of the whole sequence."""

    is_weight: ClassVar[bool] = True
    type: Literal["seq_tis"] = "seq_tis"
    cap: AtLeastOne = 2.0


class SeqMisConfig(CorrectionSection):
    """Importance weight of the whole sequence, 0 above the cap."""

    is_weight: ClassVar[bool] = True
    type: Literal["seq_mis"] = "seq_mis"
    cap: AtLeastOne = 3.0


class SeqMaskConfig(CorrectionSection):
    """Drops sequences whose product of ratios is outside the band."""

    type: Literal["seq_mask"] = "seq_mask"
    low: AtMostOne = 0.5
    high: AtLeastOne = 2.0


class GeometricMaskConfig(CorrectionSection):
    """Drops sequences whose geometric mean of ratios is outside the band."""

    type: Literal["geometric_mask"] = "geometric_mask"
    low: AtMostOne = 0.999
    high: AtLeastOne = 1.001


class K3MaskConfig(CorrectionSection):
    """Drops sequences whose mean k3 from the sampler is above max_k3."""

    type: Literal["k3_mask"] = "k3_mask"
    max_k3: PositiveFloat = 0.01


class OpsmConfig(CorrectionSection):
    """Drops what has a negative advantage and became unlikely (arXiv:2512.02556)."""

    type: Literal["opsm"] = "opsm"
    delta: NonNegative = 0.5


class M2poConfig(CorrectionSection):
    """Drops the farthest tokens until the second moment of a step is tau (arXiv:2510.01161)."""

    whole_step: ClassVar[bool] = True
    type: Literal["m2po"] = "m2po"
    tau: PositiveFloat = 0.04


class ClipCovConfig(CorrectionSection):
    """Drops random tokens of those that make the entropy fall (arXiv:2505.22617)."""

    whole_step: ClassVar[bool] = True
    type: Literal["clip_cov"] = "clip_cov"
    frac: Share = 2e-4
    low: float = 1.0
    high: float = 5.0

    @model_validator(mode="after")
    def _band_is_not_empty(self) -> ClipCovConfig:
        if self.low >= self.high:
            raise ValueError(
                f"low is {self.low} and high is {self.high}: no covariance is between them; "
                "raise high or lower low"
            )
        return self


class TopEntropyConfig(CorrectionSection):
    """Keeps the tokens of highest entropy (arXiv:2506.01939)."""

    whole_step: ClassVar[bool] = True
    type: Literal["top_entropy"] = "top_entropy"
    frac: Share = 0.2


CorrectionConfig = Annotated[
    TisConfig
    | IcepopConfig
    | TokenMaskConfig
    | SeqTisConfig
    | SeqMisConfig
    | SeqMaskConfig
    | GeometricMaskConfig
    | K3MaskConfig
    | OpsmConfig
    | M2poConfig
    | ClipCovConfig
    | TopEntropyConfig,
    Field(discriminator="type"),
]

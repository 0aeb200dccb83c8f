"""Losses of preference data and reward models: one class each, named as the function in
`algo/preferences/` that it sets up.

The fields are the function's keyword-only arguments. `paired` says whether it reads pairs (chosen,
rejected) or single answers with a label.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from posttrain.config.section import NonNegative, PositiveFloat, Section

FlipRate = Annotated[float, Field(ge=0, lt=0.5)]


class PreferenceSection(Section):
    """Base of every preference loss."""

    paired: ClassVar[bool] = True


class DpoConfig(PreferenceSection):
    """Direct preference optimisation (arXiv:2305.18290), cDPO with label smoothing."""

    type: Literal["dpo"] = "dpo"
    beta: PositiveFloat = 0.1
    label_smoothing: FlipRate = Field(default=0.0, description="Share of labels taken as wrong.")
    length_normalised: bool = Field(
        default=False, description="Log-ratios per token; beta is then 2 to 10, not .1."
    )


class RobustDpoConfig(PreferenceSection):
    """DPO that is unbiased under labels flipped at a known rate (arXiv:2403.00409)."""

    type: Literal["robust_dpo"] = "robust_dpo"
    beta: PositiveFloat = 0.1
    flip_rate: FlipRate = 0.1


class IpoConfig(PreferenceSection):
    """Identity preference optimisation (arXiv:2310.12036)."""

    type: Literal["ipo"] = "ipo"
    beta: PositiveFloat = Field(default=0.1, description="The margin to reach is 1 / (2 beta).")
    length_normalised: bool = Field(default=False, description="Log-ratios per token, as TRL.")


class HingeConfig(PreferenceSection):
    """Hinge on log-ratios: SLiC as in RSO (arXiv:2309.06657)."""

    type: Literal["hinge"] = "hinge"
    beta: PositiveFloat = Field(default=0.1, description="The hinge is at a margin of 1 / beta.")


class SimpoConfig(PreferenceSection):
    """Simple preference optimisation, without reference (arXiv:2405.14734)."""

    type: Literal["simpo"] = "simpo"
    beta: PositiveFloat = 2.0
    gamma: NonNegative = Field(default=0.5, description="Margin, in units of the logit.")


class CpoConfig(PreferenceSection):
    """Contrastive preference optimisation, without reference (arXiv:2401.08417)."""

    type: Literal["cpo"] = "cpo"
    beta: PositiveFloat = 0.1
    nll_coef: NonNegative = Field(default=1.0, description="Weight of imitating the chosen.")


class OrpoConfig(PreferenceSection):
    """Odds-ratio preference optimisation, without reference (arXiv:2403.07691)."""

    type: Literal["orpo"] = "orpo"
    odds_coef: NonNegative = Field(default=0.1, description="The paper's lambda, TRL's beta.")


class ApoZeroConfig(PreferenceSection):
    """Anchored preference optimisation: chosen up, rejected down (arXiv:2408.06266)."""

    type: Literal["apo_zero"] = "apo_zero"
    beta: PositiveFloat = 0.1


class ApoDownConfig(PreferenceSection):
    """Anchored preference optimisation: both down, the rejected more (arXiv:2408.06266)."""

    type: Literal["apo_down"] = "apo_down"
    beta: PositiveFloat = 0.1


class KtoConfig(PreferenceSection):
    """Kahneman-Tversky optimisation of single answers (arXiv:2402.01306)."""

    paired: ClassVar[bool] = False
    type: Literal["kto"] = "kto"
    beta: PositiveFloat = 0.1
    desirable_coef: PositiveFloat = 1.0
    undesirable_coef: PositiveFloat = Field(
        default=1.0,
        description="Choose coefs with desirable_coef * num_desirable within 1 to 4/3 of "
        "undesirable_coef * num_undesirable.",
    )


PreferenceLossConfig = Annotated[
    DpoConfig
    | RobustDpoConfig
    | IpoConfig
    | HingeConfig
    | SimpoConfig
    | CpoConfig
    | OrpoConfig
    | ApoZeroConfig
    | ApoDownConfig
    | KtoConfig,
    Field(discriminator="type"),
]


class BradleyTerryConfig(Section):
    """A reward model from pairs, its scores centred (arXiv:2312.09244)."""

    type: Literal["bradley_terry"] = "bradley_terry"
    margin: NonNegative = 0.0
    centre_coef: NonNegative = 0.01

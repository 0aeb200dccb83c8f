"""Policy losses: one class each, named as the function in `algo/losses/` that it sets up.

The fields are the function's keyword-only arguments. Class variables say what goes with it:
`aggregations`, the default first; `anchor_is_sampler`, whether the loss weighs by the sampler's own
log-probs, so that a behaviour correction on top would count it twice; `reads_anchor`, whether it
reads prox at all; `has_ratio`, whether policy over anchor is a weight in it.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from posttrain.config.section import Fraction, NonNegative, PositiveFloat, Section

Aggregation = Literal[
    "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "fixed_length", "prompt_mean"
]
EVERY_AGGREGATION: tuple[Aggregation, ...] = (
    "token_mean",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "fixed_length",
    "prompt_mean",
)
# Of a loss whose ratio belongs to a whole sequence: its mean over tokens is the sequence's loss.
PER_SEQUENCE: tuple[Aggregation, ...] = ("seq_mean_token_mean",)
Below = Annotated[float, Field(gt=0, lt=1)]  # how far under 1 a ratio may go


class LossSection(Section):
    """Base of every policy loss."""

    aggregations: ClassVar[tuple[Aggregation, ...]] = EVERY_AGGREGATION
    anchor_is_sampler: ClassVar[bool] = False
    reads_anchor: ClassVar[bool] = True
    has_ratio: ClassVar[bool] = True


class PpoClipConfig(LossSection):
    """Clipped surrogate (arXiv:1707.06347), unequal bounds (arXiv:2503.14476), dual clip
    (arXiv:1912.09729)."""

    type: Literal["ppo_clip"] = "ppo_clip"
    clip_low: Below = 0.2
    clip_high: PositiveFloat = 0.28
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(
        default=3.0, description="Most that a negative advantage's loss grows to, times -A."
    )


class GspoConfig(LossSection):
    """Clipped ratio of a whole sequence, the geometric mean of its tokens' (arXiv:2507.18071).

    The bounds are a thousand times tighter than PPO's: means of log-ratios hardly move.
    """

    aggregations: ClassVar[tuple[Aggregation, ...]] = PER_SEQUENCE
    type: Literal["gspo"] = "gspo"
    clip_low: Below = 3e-4
    clip_high: PositiveFloat = 4e-4


class GspoTokenConfig(LossSection):
    """GSPO with a gradient of its own at each token (arXiv:2507.18071 section 4.3)."""

    aggregations: ClassVar[tuple[Aggregation, ...]] = PER_SEQUENCE
    type: Literal["gspo_token"] = "gspo_token"
    clip_low: Below = 3e-4
    clip_high: PositiveFloat = 4e-4


class CispoConfig(LossSection):
    """Policy gradient with a capped weight, no token dropped (arXiv:2506.13585)."""

    type: Literal["cispo"] = "cispo"
    cap: PositiveFloat = Field(
        default=2.0, description="Largest weight: 1 + eps_high of verl, epsilon_high of TRL."
    )


class SapoConfig(LossSection):
    """Sigmoid gate in place of the clip (arXiv:2511.20347)."""

    type: Literal["sapo"] = "sapo"
    tau_pos: PositiveFloat = 1.0
    tau_neg: PositiveFloat = 1.05


class ToprConfig(LossSection):
    """Positive trajectories supervised, negative ones with weight min(policy / sampler, 1)
    (arXiv:2503.14286)."""

    anchor_is_sampler: ClassVar[bool] = True
    reads_anchor: ClassVar[bool] = False
    type: Literal["topr"] = "topr"


class GmpoConfig(LossSection):
    """Geometric mean of ratios, each clipped by itself (arXiv:2507.20673)."""

    aggregations: ClassVar[tuple[Aggregation, ...]] = PER_SEQUENCE
    type: Literal["gmpo"] = "gmpo"
    clip_low: PositiveFloat = Field(default=0.4, description="Bound on the log-ratio, A < 0.")
    clip_high: PositiveFloat = Field(default=0.4, description="Bound on the log-ratio, A > 0.")


class DppoConfig(LossSection):
    """Trust region on the move of a token's probability (arXiv:2602.04879)."""

    anchor_is_sampler: ClassVar[bool] = True
    reads_anchor: ClassVar[bool] = False
    type: Literal["dppo"] = "dppo"
    mask_low: Fraction = 0.2
    mask_high: Fraction = 0.2
    kl_tau: NonNegative = Field(default=1e-3, description="Weight of (policy - sampler)^2.")


class GpgConfig(LossSection):
    """Plain policy gradient, no ratio (arXiv:2504.02546)."""

    reads_anchor: ClassVar[bool] = False
    has_ratio: ClassVar[bool] = False
    type: Literal["gpg"] = "gpg"


class IsReinforceConfig(LossSection):
    """Policy gradient with weight min(policy / sampler, cap)."""

    anchor_is_sampler: ClassVar[bool] = True
    reads_anchor: ClassVar[bool] = False
    type: Literal["is_reinforce"] = "is_reinforce"
    cap: PositiveFloat = 2.0


class AspoConfig(LossSection):
    """Experimental. PPO that weighs good tokens by the reciprocal ratio (arXiv:2510.06062)."""

    type: Literal["aspo"] = "aspo"
    clip_low: Below = 0.2
    clip_high: PositiveFloat = 0.2
    cap: PositiveFloat = Field(
        default=3.0, description="Soft dual clip: holds the weight, keeps the gradient."
    )


class VespoConfig(LossSection):
    """Experimental. Weight w^k exp(lambda (1 - w)) of a whole sequence, w = policy / sampler
    (arXiv:2602.10693)."""

    anchor_is_sampler: ClassVar[bool] = True
    reads_anchor: ClassVar[bool] = False
    type: Literal["vespo"] = "vespo"
    k_pos: PositiveFloat = 2.0
    lambda_pos: PositiveFloat = 3.0
    k_neg: PositiveFloat = 3.0
    lambda_neg: PositiveFloat = 2.0


class KimiConfig(LossSection):
    """Policy gradient with a quadratic leash (arXiv:2501.12599), token by token."""

    has_ratio: ClassVar[bool] = False
    type: Literal["kimi"] = "kimi"
    tau: PositiveFloat = Field(default=1e-3, description="Weight of (policy - prox)^2.")


LossConfig = Annotated[
    PpoClipConfig
    | GspoConfig
    | GspoTokenConfig
    | CispoConfig
    | SapoConfig
    | ToprConfig
    | GmpoConfig
    | DppoConfig
    | GpgConfig
    | IsReinforceConfig
    | AspoConfig
    | VespoConfig
    | KimiConfig,
    Field(discriminator="type"),
]

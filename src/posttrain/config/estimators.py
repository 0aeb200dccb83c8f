"""Advantage estimators: one class each, named as the function in `algo/advantages/`.

The fields that a class adds to `PolicyGradientConfig` are the function's keyword-only arguments.
`min_group_size` is the smallest group that gives it a baseline. `equal_rewards_teach` says that a
group of equal outcomes can have advantages other than 0, so that it isn't dropped for them;
`has_critic` that the function reads values, and that its module has `TYPE_targets` to fit them to.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from posttrain.config.critic import CriticConfig
from posttrain.config.policy_gradient import PolicyGradientConfig
from posttrain.config.section import Fraction, PositiveFloat

Variance = Literal["unbiased", "population"]
Discount = Annotated[float, Field(gt=0, le=1)]


class RlooConfig(PolicyGradientConfig):
    """Leave-one-out baseline (arXiv:2402.14740)."""

    type: Literal["rloo"] = "rloo"


class GrpoConfig(PolicyGradientConfig):
    """Group-mean baseline, divided by a standard deviation (arXiv:2402.03300)."""

    type: Literal["grpo"] = "grpo"
    std: Literal["group", "batch", "none"] = "group"
    std_estimator: Variance = "unbiased"
    std_eps: PositiveFloat = 1e-6

    @model_validator(mode="after")
    def _settings_have_a_std(self) -> GrpoConfig:
        if self.std == "none":
            self.refuse_without_effect(["std_estimator", "std_eps"], 'with std = "none"')
        return self


class DrGrpoConfig(PolicyGradientConfig):
    """Group-mean baseline (arXiv:2503.20783), there with aggregation = "fixed_length"."""

    type: Literal["dr_grpo"] = "dr_grpo"


class OpoConfig(PolicyGradientConfig):
    """Length-weighted mean as baseline (arXiv:2505.23585), meant for exactly on-policy data."""

    type: Literal["opo"] = "opo"


class GpgConfig(PolicyGradientConfig):
    """Group-mean baseline, scaled up for the groups that teach nothing (arXiv:2504.02546)."""

    type: Literal["gpg"] = "gpg"
    scale: Literal["paper", "verl"] = Field(
        default="paper",
        description="paper: all members over those of groups with a spread; verl: over those "
        "whose reward is not 0.",
    )
    f_norm: PositiveFloat = 1.0
    zero_variance: Literal["drop", "drop_same_correct", "keep"] = Field(
        default="keep",
        description="Only keep: the scale makes up for flat groups that are counted.",
    )

    @model_validator(mode="after")
    def _flat_groups_are_made_up_for_once(self) -> GpgConfig:
        if self.zero_variance != "keep":
            raise ValueError(
                f'zero_variance is "{self.zero_variance}": gpg already scales up for the groups '
                "without variance, and dropping them from the denominator would do so again; leave "
                "it out"
            )
        return self


class MaxRlConfig(PolicyGradientConfig):
    """Group-mean baseline, divided by the mean (arXiv:2602.02710). For rewards >= 0."""

    type: Literal["max_rl"] = "max_rl"

    @model_validator(mode="after")
    def _rewards_stay_positive(self) -> MaxRlConfig:
        negative = [s.type for s in self.shaping if s.type != "multiplicative_length"]
        if negative:
            raise ValueError(
                f"max_rl divides by the mean reward, and shaping {negative[0]} makes rewards "
                "negative; leave the shaping out, or use another estimator"
            )
        return self


class PassAtKConfig(PolicyGradientConfig):
    """R_max - R_second for the best of the group, 0 for the others (arXiv:2503.19595)."""

    type: Literal["pass_at_k"] = "pass_at_k"


class EqualRewardsTeachConfig(PolicyGradientConfig):
    """Base of those whose advantages aren't 0 just because a group's outcomes are equal."""

    equal_rewards_teach: ClassVar[bool] = True

    @model_validator(mode="after")
    def _no_group_is_flat(self) -> EqualRewardsTeachConfig:
        self.refuse_without_effect(
            ["zero_variance"], "here: a group of equal outcomes still has advantages"
        )
        return self


class ReinforceConfig(EqualRewardsTeachConfig):
    """No baseline: A is the reward. For TOPR (arXiv:2503.14286) and for comparison."""

    min_group_size: ClassVar[int] = 1
    type: Literal["reinforce"] = "reinforce"


class RemaxConfig(EqualRewardsTeachConfig):
    """The reward of a greedy answer as baseline (arXiv:2310.10505): one more rollout a task."""

    min_group_size: ClassVar[int] = 1
    type: Literal["remax"] = "remax"


class RaeConfig(EqualRewardsTeachConfig):
    """A moving average of a role's rewards as baseline (arXiv:2506.24119)."""

    min_group_size: ClassVar[int] = 1
    type: Literal["rae"] = "rae"
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.95


class GdpoConfig(EqualRewardsTeachConfig):
    """Each reward term normalised in its group, then added, then normalised over the batch
    (arXiv:2601.05242)."""

    type: Literal["gdpo"] = "gdpo"
    std_eps: PositiveFloat = 1e-6

    @model_validator(mode="after")
    def _shaping_is_no_term(self) -> GdpoConfig:
        self.refuse_without_effect(["shaping"], "with gdpo, which reads the verdict's terms")
        return self


class OptimalTokenBaselineConfig(PolicyGradientConfig):
    """A baseline for each position, weighted by how uncertain the path to it was (verl)."""

    type: Literal["optimal_token_baseline"] = "optimal_token_baseline"


class GigpoConfig(EqualRewardsTeachConfig):
    """Turns compared with the group's turns that began in the same state (arXiv:2505.10978)."""

    type: Literal["gigpo"] = "gigpo"
    gamma: Discount = 0.95
    omega: PositiveFloat = Field(default=1.0, description="Weight of the turn's advantage.")
    normalise: bool = Field(default=False, description="Divide both advantages by their std.")


class MtGrpoConfig(EqualRewardsTeachConfig):
    """Turn rewards compared turn by turn, beside the outcome (arXiv:2505.11821 v1)."""

    type: Literal["mt_grpo"] = "mt_grpo"
    lam: PositiveFloat = Field(
        default=1.0, description="Weight of the outcome in turns that have rewards."
    )
    std_estimator: Variance = "unbiased"
    std_eps: PositiveFloat = 1e-6


class TurnDiscountedConfig(PolicyGradientConfig):
    """Leave-one-out advantage of the outcome, times gamma for each turn that follows."""

    type: Literal["turn_discounted"] = "turn_discounted"
    gamma: Discount = 0.95


class ProcessConfig(EqualRewardsTeachConfig):
    """Turn rewards normalised over the group and summed over the future (arXiv:2402.03300)."""

    type: Literal["process"] = "process"
    std_estimator: Variance = "unbiased"
    std_eps: PositiveFloat = 1e-6


class PureMinConfig(EqualRewardsTeachConfig):
    """A trajectory is worth its worst turn (arXiv:2504.15275), with a leave-one-out baseline."""

    type: Literal["pure_min"] = "pure_min"
    temperature: PositiveFloat = 0.1


class ReinforcePpConfig(EqualRewardsTeachConfig):
    """Returns to go of tokens, whitened over the batch (arXiv:2501.03262)."""

    min_group_size: ClassVar[int] = 1
    type: Literal["reinforce_pp"] = "reinforce_pp"
    gamma: Discount = 1.0
    variance: Variance = "unbiased"


class ReinforcePpBaselineConfig(PolicyGradientConfig):
    """Group-mean baseline, whitened over all tokens of the batch (arXiv:2501.03262)."""

    type: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    variance: Variance = "unbiased"


class CriticEstimatorConfig(EqualRewardsTeachConfig):
    """Base of those that read a critic's values."""

    min_group_size: ClassVar[int] = 1
    has_critic: ClassVar[bool] = True

    critic: CriticConfig = Field(default_factory=CriticConfig)

    @model_validator(mode="after")
    def _cut_trajectories_are_there(self) -> CriticEstimatorConfig:
        if self.truncated == "mask":
            self.critic.refuse_without_effect(
                ["bootstrap_truncated"], 'with truncated = "mask", which leaves them out'
            )
        return self

    gamma: Discount = 1.0
    whitening: Literal["unbiased", "population", "none"] = Field(
        default="unbiased", description="Of advantages over all tokens; never of the targets."
    )


class GaeConfig(CriticEstimatorConfig):
    """Generalised advantages of tokens (arXiv:1506.02438): PPO with a critic."""

    type: Literal["gae"] = "gae"
    lam: Fraction = 0.95
    lam_critic: Fraction = Field(
        default=1.0, description="Of the critic's targets (decoupled GAE, arXiv:2503.01491)."
    )
    length_alpha: PositiveFloat | None = Field(
        default=None,
        description="lambda = 1 - 1 / (length_alpha tokens) instead of lam; VAPO has 0.05.",
    )

    @model_validator(mode="after")
    def _one_lambda(self) -> GaeConfig:
        if self.length_alpha is not None:
            self.refuse_without_effect(["lam"], "with length_alpha")
        return self


class TurnPpoConfig(CriticEstimatorConfig):
    """Generalised advantages of turns, one value a turn (arXiv:2512.17008)."""

    type: Literal["turn_ppo"] = "turn_ppo"
    gamma: Discount = 0.99
    lam: Fraction = 0.9
    lam_critic: Fraction = 1.0


class VtraceConfig(CriticEstimatorConfig):
    """Off-policy advantages and targets (arXiv:1802.01561), weighted by prox / sampler."""

    type: Literal["vtrace"] = "vtrace"
    rho_bar: PositiveFloat = 1.0
    c_bar: PositiveFloat = 1.0

    @property
    def weighs_by_sampler(self) -> str | None:
        return "vtrace"

    @model_validator(mode="after")
    def _anchor_is_recomputed(self) -> VtraceConfig:
        if self.anchor != "prox" or self.loss.anchor_is_sampler:
            raise ValueError(
                f'anchor is "{self.anchor}" and loss {self.loss.type!r}: vtrace weighs by '
                "prox / sampler, which needs the log-probs recomputed at the start of the step and "
                'counted once; use anchor = "prox" and a loss without the sampler, ppo_clip'
            )
        return self


EstimatorConfig = Annotated[
    RlooConfig
    | GrpoConfig
    | DrGrpoConfig
    | OpoConfig
    | GpgConfig
    | MaxRlConfig
    | PassAtKConfig
    | ReinforceConfig
    | RemaxConfig
    | RaeConfig
    | GdpoConfig
    | OptimalTokenBaselineConfig
    | GigpoConfig
    | MtGrpoConfig
    | TurnDiscountedConfig
    | ProcessConfig
    | PureMinConfig
    | ReinforcePpConfig
    | ReinforcePpBaselineConfig
    | GaeConfig
    | TurnPpoConfig
    | VtraceConfig,
    Field(discriminator="type"),
]

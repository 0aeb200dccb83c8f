"""From a recipe's [algo] to the algorithm: which rules read which stream."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from posttrain.algo import distillation
from posttrain.algo.algorithm import Algorithm, Part, mixed
from posttrain.algo.columns import Rule, rule
from posttrain.algo.component import Component, PolicyLoss
from posttrain.algo.credit import ImitationCredit, LabelCredit, PolicyCredit, PreferenceCredit
from posttrain.algo.regression import ValueRegression
from posttrain.algo.selection import success_weights
from posttrain.algo.supervised import (
    Divergence,
    Imitation,
    LabelledPreference,
    Preference,
    ScorePreference,
)
from posttrain.config import (
    AlgoConfig,
    DistillConfig,
    PolicyGradientConfig,
    PreferenceConfig,
    RaftConfig,
    RewardModelConfig,
    SftConfig,
)
from posttrain.config.corrections import TisConfig
from posttrain.errors import ConfigError

_LOGLINEAR = (
    'anchor = "loglinear" saves the forward pass at the start of a step, and something else here '
    "needs it (a token-level estimator, KL in the reward, or a correction over the whole step); "
    'use anchor = "prox"'
)


def build_algorithm(
    config: AlgoConfig, of_environment: Mapping[str, AlgoConfig] | None = None
) -> Algorithm:
    """The algorithm that [algo] describes, with one of its own for some environments."""
    parts = {"": build_part(config)}
    parts |= {name: build_part(own) for name, own in (of_environment or {}).items()}
    algorithm = mixed(parts)
    anchors = {getattr(own, "anchor", "prox") for own in (config, *(of_environment or {}).values())}
    if "loglinear" in anchors and any(c.whole_step for c in algorithm.components):
        raise ConfigError(_LOGLINEAR)
    return algorithm


def build_part(config: AlgoConfig) -> Part:
    """One algorithm."""
    match config:
        case SftConfig():
            return Part(ImitationCredit(), (Imitation(aggregation=config.aggregation),))
        case RaftConfig():
            settings = config.model_dump(include={"threshold", "max_per_task", "normalise"})
            credit = ImitationCredit(Rule(success_weights, settings))
            return Part(credit, (Imitation(aggregation=config.aggregation),))
        case PreferenceConfig():
            loss = rule("preferences", config.loss)
            if not config.loss.paired:
                return Part(LabelCredit(), (LabelledPreference(loss),))
            return Part(PreferenceCredit(), (Preference(loss),))
        case RewardModelConfig():
            credit = PreferenceCredit(stream="score", placed="last")
            return Part(credit, (ScorePreference(rule("preferences", config.loss)),))
        case DistillConfig(divergence="reverse_kl" | "forward_kl" | "jsd"):
            compare = Rule.of(getattr(distillation, config.divergence), config)
            component = Divergence(compare, config.effective_aggregation, config.fixed_length)
            return Part(ImitationCredit(stream="policy"), (component,))
        case PolicyGradientConfig():
            return _policy_gradient(config)
    raise AssertionError(f"no algorithm for {type(config).__name__}")


def _policy_gradient(config: PolicyGradientConfig) -> Part:
    estimate = rule("advantages", config)
    of_tokens = any(name.endswith("_N") for name in estimate.columns)
    corrections = config.effective_corrections
    policy = PolicyLoss(
        rule("losses", config.loss),
        config.effective_aggregation,
        config.fixed_length,
        estimate=estimate if of_tokens else None,
        weights=tuple(rule("corrections", c) for c in corrections if c.is_weight),
        masks=tuple(rule("corrections", c) for c in corrections if not c.is_weight),
        batch_corrections=any(c.whole_step for c in corrections),
        kl_weight=rule("corrections", TisConfig()) if config.weighs_by_sampler else None,
        anchor=config.anchor,
        kl=config.kl,
        entropy=config.entropy,
    )
    components: list[Component] = [policy]
    if config.has_critic:
        components.append(_critic(config))
    if config.positive_nll_coef:
        components.append(Imitation(config.positive_nll_coef))
    if config.hindsight_coef:
        components.append(Imitation(config.hindsight_coef, stream="hindsight", kind="hindsight"))
    credit = PolicyCredit(
        None if of_tokens else estimate,
        shaping=tuple(rule("shaping", shaping) for shaping in config.shaping),
        zero_variance=config.zero_variance if config.drops_flat_groups else "keep",
        truncated=config.truncated,
        imitate="imitation" if config.positive_nll_coef else None,
        hindsight=bool(config.hindsight_coef),
    )
    return Part(credit, tuple(components))


def _critic(config: PolicyGradientConfig) -> ValueRegression:
    """Values fitted to the targets that the estimator's module names TYPE_targets."""
    name: str = config.type  # type: ignore[attr-defined]
    targets = getattr(
        importlib.import_module(f"posttrain.algo.advantages.{name}"), f"{name}_targets"
    )
    critic = config.critic  # type: ignore[attr-defined]
    return ValueRegression(
        Rule.of(targets, config), clip=critic.clip, coef=critic.coef, kl=config.kl
    )

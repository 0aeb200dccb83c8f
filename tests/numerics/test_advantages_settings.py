"""Settings of estimators: every key reaches a function, and what has no effect is refused."""

from __future__ import annotations

import importlib
import inspect
import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest
from pydantic import TypeAdapter, ValidationError

from posttrain.algo.columns import rule
from posttrain.config.estimators import CriticEstimatorConfig, EstimatorConfig, GaeConfig
from posttrain.config.policy_gradient import PolicyGradientConfig

CLASSES = get_args(get_args(EstimatorConfig)[0])
LOAD = TypeAdapter(EstimatorConfig).validate_python
each = pytest.mark.parametrize("config_class", CLASSES, ids=lambda c: c.__name__)


def targets_of(config):
    module = importlib.import_module(f"posttrain.algo.advantages.{config.type}")
    return getattr(module, f"{config.type}_targets", None)


@each
def test_every_key_of_an_estimator_is_read_by_its_function_or_its_targets(config_class):
    config = config_class()
    elsewhere = {"type", "critic"}  # names the function; is a section for the learner
    own = set(config_class.model_fields) - set(PolicyGradientConfig.model_fields) - elsewhere
    used = set(rule("advantages", config).settings)
    targets = targets_of(config)
    if targets is not None:
        parameters = inspect.signature(targets).parameters.values()
        used |= {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert used == own


@each
def test_an_estimator_that_reads_values_says_how_to_fit_them(config_class):
    reads_values = "values_N" in rule("advantages", config_class()).columns
    assert reads_values is issubclass(config_class, CriticEstimatorConfig)
    assert reads_values is (targets_of(config_class()) is not None)


@each
def test_an_estimator_is_chosen_by_its_name_alone(config_class):
    type_ = config_class.model_fields["type"].default
    assert type(LOAD({"type": type_})) is config_class


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"type": "grpo", "std": "none", "std_eps": 1e-3}, "std_eps has no effect"),
        ({"type": "grpo", "std": "none", "std_estimator": "population"}, "std_estimator has no"),
        ({"type": "gae", "length_alpha": 0.05, "lam": 0.9}, "lam has no effect with length_alpha"),
        ({"type": "gae", "zero_variance": "keep"}, "zero_variance has no effect"),
        ({"type": "vtrace", "corrections": ["tis"]}, r"already weighs .* \['tis'\]"),
        ({"type": "vtrace", "anchor": "sampler"}, 'use anchor = "prox"'),
        (
            {
                "type": "max_rl",
                "shaping": [{"type": "soft_overlong", "max_length": 9, "cache_length": 3}],
            },
            "soft_overlong makes rewards negative",
        ),
        (
            {
                "type": "gdpo",
                "shaping": [{"type": "soft_overlong", "max_length": 9, "cache_length": 3}],
            },
            "shaping has no effect with gdpo",
        ),
        ({"type": "gpg", "zero_variance": "drop"}, "would do so again"),
        ({"type": "rae", "decay": 1.0}, "decay"),
        ({"type": "gigpo", "omega": 0.0}, "omega"),
        ({"type": "gae", "gamma": 0.0}, "gamma"),
    ],
)
def test_a_setting_without_effect_or_sense_is_refused(recipe, message):
    with pytest.raises(ValidationError, match=message):
        LOAD(recipe)


def test_vtrace_leaves_no_second_weight_for_the_mismatch():
    assert [c.type for c in GaeConfig().effective_corrections] == ["tis"]
    assert LOAD({"type": "vtrace"}).effective_corrections == ()


def test_a_group_of_one_is_enough_where_siblings_are_not_the_baseline():
    alone = {c.model_fields["type"].default for c in CLASSES if c.min_group_size == 1}
    assert alone == {"reinforce", "remax", "rae", "reinforce_pp", "gae", "turn_ppo", "vtrace"}


@each
def test_the_page_of_an_estimator_shows_its_keys_with_their_defaults(config_class):
    config = config_class()
    pages = Path(__file__).parents[2] / "docs/algorithms"
    name = {"gpg": "gpg_advantages"}.get(config.type, config.type)  # gpg is its loss's page
    page = (pages / f"{name}.md").read_text(encoding="utf-8")
    block = re.search(r"```toml\n(.*?)```", page, re.DOTALL)
    assert block is not None
    shown = tomllib.loads(block[1])["algo"]
    assert type(LOAD(shown)) is config_class
    for key in set(config_class.model_fields) - set(PolicyGradientConfig.model_fields):
        default = getattr(config, key)
        if default is not None and key != "critic":  # a section with a page of its own
            assert shown[key] == default, key

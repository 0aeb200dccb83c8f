"""What the settings of corrections, KL, entropy and shaping refuse, and what their pages say."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from posttrain.algo.columns import rule
from posttrain.config import corrections, regularisers, shaping
from posttrain.config.corrections import CorrectionConfig
from posttrain.config.section import Section
from posttrain.config.shaping import ShapingConfig

PAGES = Path(__file__).parents[2] / "docs" / "algorithms"
HEADINGS = ["Equation", "Symbols", "In code", "Elsewhere", "Traps", "Here"]


def sections(module: Any) -> list[type[Section]]:
    return [
        c
        for c in vars(module).values()
        if isinstance(c, type) and issubclass(c, Section) and "type" in c.model_fields
    ]


def type_of(section: type[Section]) -> str:
    return section.model_fields["type"].default


CORRECTIONS = {type_of(c): c for c in sections(corrections)}
SHAPING = {type_of(c): c for c in sections(shaping)}


def test_every_class_is_in_its_union():
    for name, union in ((n, CorrectionConfig) for n in CORRECTIONS):
        assert TypeAdapter(union).validate_python({"type": name}).type == name
    needed = {"max_length": 100, "cache_length": 10, "reference_length": 50}
    for name, section in SHAPING.items():
        given = {k: v for k, v in needed.items() if k in section.model_fields}
        assert TypeAdapter(ShapingConfig).validate_python({"type": name, **given}).type == name


@pytest.mark.parametrize(
    ("package", "name"),
    [*(("corrections", n) for n in CORRECTIONS), *(("shaping", n) for n in SHAPING)],
)
def test_a_rule_takes_every_setting_of_its_class(package, name):
    section = (CORRECTIONS | SHAPING)[name]
    needed = {"max_length": 100, "cache_length": 10, "reference_length": 50}
    config = section(**{k: v for k, v in needed.items() if k in section.model_fields})
    assert set(rule(package, config).settings) == set(section.model_fields) - {"type"}


def test_only_weights_say_that_they_weigh():
    weigh = {name for name, section in CORRECTIONS.items() if section.is_weight}
    assert weigh == {"tis", "icepop", "seq_tis", "seq_mis"}


@pytest.mark.parametrize(
    ("section", "settings", "reason"),
    [
        (corrections.TisConfig, {"cap": 0.5}, "cap"),
        (corrections.TisConfig, {"floor": 1.5}, "floor"),
        (corrections.SeqMisConfig, {"cap": 0.9}, "cap"),
        (corrections.IcepopConfig, {"low": 1.2}, "low"),
        (corrections.GeometricMaskConfig, {"high": 0.999}, "high"),
        (corrections.TokenMaskConfig, {"low": -0.1}, "low"),
        (corrections.ClipCovConfig, {"low": 5.0}, "no covariance is between"),
        (corrections.ClipCovConfig, {"frac": 0.0}, "frac"),
        (corrections.TopEntropyConfig, {"frac": 0.0}, "frac"),
        (shaping.SoftOverlongConfig, {"max_length": 10, "cache_length": 11}, "below 0 tokens"),
        (shaping.CosineLengthConfig, {"max_length": 10, "wrong_long": 1.0}, "learn to be wrong"),
        (shaping.CosineLengthConfig, {"max_length": 10, "exceed": 1.5}, "learn to be wrong"),
        (shaping.MultiplicativeLengthConfig, {"reference_length": 9, "gamma": 1.0}, "gamma"),
        (shaping.RepetitionConfig, {"ngram": 0}, "ngram"),
        (regularisers.EntropyConfig, {"coef": 0.0}, "has no effect"),
        (regularisers.EntropyConfig, {"coef": -0.1}, "coef"),
        (regularisers.KlConfig, {"estimator": "k3"}, "only k1 has the gradient"),
        (regularisers.KlConfig, {"place": "loss"}, "expected gradient of 0"),
        (regularisers.KlConfig, {"horizon": 5}, "no effect without target"),
        (regularisers.KlConfig, {"sync_mix": 0.5}, "no effect without sync_every"),
        (regularisers.KlConfig, {"sync_every": 5, "reset_every": 5}, "both move the reference"),
        (regularisers.KlConfig, {"only": "top_covariance"}, "would hold that KL already"),
        (
            regularisers.KlConfig,
            {"place": "loss", "estimator": "k2", "top_frac": 0.1},
            'no effect with only = "all"',
        ),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_with_the_reason(section, settings, reason):
    with pytest.raises(ValidationError, match=re.escape(reason)):
        section(**settings)


def test_sound_settings_are_accepted():
    regularisers.KlConfig(target=0.05, horizon=100)
    regularisers.KlConfig(place="loss", estimator="k3_weighted", sync_every=512)
    regularisers.KlConfig(place="loss", estimator="k2", only="top_covariance", top_frac=0.01)
    regularisers.EntropyConfig(coef=0.001, target=0.2)
    shaping.SoftOverlongConfig(max_length=10, cache_length=10)


# --- pages --------------------------------------------------------------------------------------

OTHER_PAGES = ["kl", "kl_cov", "entropy", "prox_loglinear", "dynamic_sampling"]


@pytest.mark.parametrize("name", [*CORRECTIONS, *SHAPING, *OTHER_PAGES])
def test_every_method_has_a_page_with_the_same_headings(name):
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == HEADINGS
    assert text.startswith("# ")


def block(name: str) -> dict[str, Any]:
    (toml,) = re.findall(
        r"^```toml\n(.*?)^```", (PAGES / f"{name}.md").read_text(encoding="utf-8"), re.M | re.S
    )
    return tomllib.loads(toml)["algo"]


@pytest.mark.parametrize("name", [*CORRECTIONS, *SHAPING, "kl", "entropy"])
def test_the_keys_and_defaults_on_a_page_are_those_of_the_class(name):
    if name in CORRECTIONS:
        section, (given,) = CORRECTIONS[name], block(name)["corrections"]
    elif name in SHAPING:
        section, (given,) = SHAPING[name], block(name)["shaping"]
    else:
        section = {"kl": regularisers.KlConfig, "entropy": regularisers.EntropyConfig}[name]
        given = block(name)[name]
    section(**given)
    for key, field in section.model_fields.items():
        if field.is_required():
            assert key in given, key
        elif field.default is not None:  # None has no TOML
            assert given[key] == field.default, key

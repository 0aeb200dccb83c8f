"""One rule is one config class, one function of the same name and one page; no vector is unused."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from posttrain.algo import columns
from posttrain.algo.columns import rule
from posttrain.config import EstimatorConfig, PolicyGradientConfig
from posttrain.config.corrections import CorrectionConfig
from posttrain.config.losses import LossConfig
from posttrain.config.objectives import PreferenceLossConfig
from posttrain.config.shaping import ShapingConfig
from posttrain.recipe_files import models_in

UNIONS: dict[str, Any] = {
    "losses": LossConfig,
    "advantages": EstimatorConfig,
    "corrections": CorrectionConfig,
    "shaping": ShapingConfig,
    "preferences": PreferenceLossConfig,
}
# Fields that set up something beside the function.
ELSEWHERE = {"type", "critic", "teacher"}


def every_rule() -> Iterator[tuple[str, type[BaseModel]]]:
    for package, union in UNIONS.items():
        for config in models_in(union):
            yield package, config


def type_of(config: type[BaseModel]) -> str:
    return config.model_fields["type"].default


RULES = [
    pytest.param(package, config, id=f"{package}-{type_of(config)}")
    for package, config in every_rule()
]


def smallest(config: type[BaseModel]) -> BaseModel:
    """With the defaults, and 10 for the lengths that have none."""
    required = [name for name, field in config.model_fields.items() if field.is_required()]
    return config(**dict.fromkeys(required, 10))


def settings_of(function: Any) -> dict[str, Any]:
    """Keyword-only parameters and their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def own_fields(config: type[BaseModel]) -> set[str]:
    shared = PolicyGradientConfig.model_fields if issubclass(config, PolicyGradientConfig) else {}
    return set(config.model_fields) - set(shared) - ELSEWHERE


@pytest.mark.parametrize(("package", "config"), RULES)
def test_a_config_class_has_its_function_by_convention(
    package: str, config: type[BaseModel]
) -> None:
    made = rule(package, smallest(config))
    assert made.function.__name__ == type_of(config)
    assert made.columns, "it reads something"
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    kinds = [p.kind for p in inspect.signature(made.function).parameters.values()]
    assert not set(kinds) & set(variadic), "a signature is the whole interface"


@pytest.mark.parametrize(("package", "config"), RULES)
def test_every_setting_is_an_argument_and_every_argument_a_setting(
    package: str, config: type[BaseModel]
) -> None:
    """A field that no function takes would be ignored without a word. A critic's own settings are
    those of the function that makes its targets. Where both have a default it is the same one, or
    None, which switches off what the setting sets."""
    name = type_of(config)
    module = importlib.import_module(f"posttrain.algo.{package}.{name}")
    arguments = settings_of(getattr(module, name))
    if getattr(config, "has_critic", False):
        arguments |= settings_of(getattr(module, f"{name}_targets"))
    assert set(arguments) == own_fields(config)
    for argument, default in arguments.items():
        field = config.model_fields[argument]
        if default not in (inspect.Parameter.empty, None) and not field.is_required():
            assert default == field.get_default(call_default_factory=True), argument


@pytest.mark.parametrize(("package", "config"), RULES)
def test_every_column_that_a_rule_reads_is_explained(package: str, config: type[BaseModel]) -> None:
    assert columns.__doc__ is not None
    unknown = [c for c in rule(package, smallest(config)).columns if c not in columns.__doc__]
    assert not unknown, f"algo/columns.py does not say what {unknown} are"


@pytest.mark.parametrize(("package", "config"), RULES)
def test_every_rule_has_its_page(package: str, config: type[BaseModel], source: Any) -> None:
    name = type_of(config)
    others = {type_of(other) for where, other in every_rule() if where != package}
    page = f"{name}_{package}" if name in others and package != "losses" else name
    text = (source.root / f"docs/algorithms/{page}.md").read_text(encoding="utf-8")
    path = f"src/posttrain/algo/{package}/{name}.py"
    assert path in text, f"docs/algorithms/{page}.md does not lead to {path}"


def test_every_vector_is_named_by_some_test(source: Any) -> None:
    vectors = json.loads((source.root / "tests/numerics/vectors.json").read_text(encoding="utf-8"))
    names = [v["name"] for v in vectors["vectors"]]
    assert len(names) == len(set(names)) > 90
    texts = [p.read_text(encoding="utf-8") for p in (source.root / "tests").rglob("*.py")]
    unused = [n for n in names if not any(f'"{n}"' in text for text in texts)]
    assert not unused, f"no test names {unused}"

"""Recipes: TOML by name or path, overrides on top, errors that say what was meant."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.config import (
    DatasetConfig,
    EstimatorConfig,
    GrpoConfig,
    PolicyGradientConfig,
    RlooConfig,
)
from posttrain.config.losses import LossConfig
from posttrain.errors import ConfigError
from posttrain.recipe_files import (
    differences,
    load_recipe,
    models_in,
    resolve,
    shipped_recipes,
    to_toml,
)

DATASET = {"type": "dataset", "path": "data.jsonl", "reward": "reward.py:score"}


def values(**sections: Any) -> dict[str, Any]:
    return {"name": "t", "env": {"type": "reverse"}, **sections}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("description=two words", "two words"),
        ('description="quoted = text"', "quoted = text"),
        ("description = spaced ", "spaced"),
        ("description=a=b", "a=b"),
        ('description=""', ""),
    ],
)
def test_an_override_is_a_toml_value_or_else_text(override: str, expected: str) -> None:
    assert resolve(values(), [override], "t").description == expected


def test_overrides_make_sections_lists_and_nothings() -> None:
    recipe = resolve(
        values(threads=2),
        ["optim.lr=1e-5", 'sampler.stop=["END", "\\n"]', "threads=none", "eval.before=false"],
        "t",
    )
    assert (recipe.optim.lr, recipe.sampler.stop) == (1e-5, ("END", "\n"))
    assert (recipe.threads, recipe.eval.before) == (None, False)


def test_the_last_override_of_a_key_wins() -> None:
    assert resolve(values(), ["num_steps=3", "num_steps=4"], "t").num_steps == 4


def test_a_section_may_leave_out_the_type_that_the_recipe_would_have_without_it() -> None:
    assert resolve(values(), [], "t").algo == RlooConfig()
    masked = resolve(values(), ["algo.truncated=mask"], "t").algo
    assert masked == RlooConfig(truncated="mask")


def test_none_is_nothing_unless_it_is_one_of_the_words_that_a_setting_takes() -> None:
    grpo = resolve(values(algo={"type": "grpo"}), ["algo.std=none", "threads=none"], "t")
    assert (grpo.algo, grpo.threads) == (GrpoConfig(std="none"), None)
    assert resolve(values(env={"type": "reverse"}), ["env.system=null"], "t").env.system is None


ALGORITHMS = [
    *({"type": "rloo", "loss": c.model_fields["type"].default} for c in models_in(LossConfig)),
    *({"type": c.model_fields["type"].default} for c in models_in(EstimatorConfig)),
    {"type": "rloo", "anchor": "sampler"},
]


@pytest.mark.parametrize("algo", ALGORITHMS, ids=str)
def test_a_recorded_algorithm_is_the_same_algorithm(algo: dict[str, Any]) -> None:
    """A run records every default: what depends on whether a key was given must not change."""
    recipe = resolve(values(algo=algo), [], "t")
    for recorded in (recipe.model_dump(mode="json"), tomllib.loads(to_toml(recipe))):
        again = resolve(recorded, [], "t").algo
        assert isinstance(again, PolicyGradientConfig)
        assert isinstance(recipe.algo, PolicyGradientConfig)
        assert again == recipe.algo
        assert again.effective_corrections == recipe.algo.effective_corrections
        assert again.effective_aggregation == recipe.algo.effective_aggregation


def test_a_section_without_a_default_must_say_its_type() -> None:
    with pytest.raises(ConfigError, match=r"set env\.type to one of arithmetic, .*reverse"):
        resolve({"name": "t", "env": {"length": 3}}, [], "t")


def test_a_mistyped_key_names_the_nearest_of_its_own_section() -> None:
    grpo = values(algo={"type": "grpo", "stdd": "none"})
    with pytest.raises(ConfigError, match=r"algo\.stdd is unknown; did you mean algo\.std\?"):
        resolve(grpo, [], "t")
    with pytest.raises(ConfigError, match=r"env\.lenght is unknown; did you mean env\.length\?"):
        resolve(values(), ["env.lenght=3"], "t")


def test_resolving_takes_nothing_from_the_values_it_was_given_for_others() -> None:
    recipe = resolve(values(), ["num_steps=3"], "t")
    again = resolve(tomllib.loads(to_toml(recipe)), [], "t")
    assert again == recipe


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_resolved_recipe_written_as_toml_is_the_same_recipe(name: str) -> None:
    recipe, _ = load_recipe(name)
    assert resolve(tomllib.loads(to_toml(recipe)), [], name) == recipe


@given(
    text=st.text(
        st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=30
    ).filter(lambda t: t.strip() == t and t not in ("none", "null"))
)
def test_any_text_survives_resolving_and_toml(text: str) -> None:
    recipe = resolve(values(description=text), [], "t")
    assert tomllib.loads(to_toml(recipe))["description"] == text


def test_files_of_a_recipe_lie_beside_it_or_where_the_user_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, here = tmp_path / "beside", tmp_path / "here"
    for folder in (beside, here):
        folder.mkdir()
    (beside / "data.jsonl").write_text("")
    (here / "reward.py").write_text("")
    text = "\n".join(f'{key} = "{value}"' for key, value in DATASET.items())
    (beside / "mine.toml").write_text(f"[env]\n{text}\n")
    monkeypatch.chdir(here)
    recipe, folder = load_recipe("../beside/mine.toml")
    assert (folder, recipe.name) == (beside, "mine")
    assert isinstance(recipe.env, DatasetConfig)
    assert recipe.env.path == str(beside / "data.jsonl")
    assert recipe.env.reward == f"{here / 'reward.py'}:score"


def test_a_module_as_reward_stays_a_module(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        '[env]\ntype = "dataset"\npath = "d.jsonl"\nreward = "package.module:score"\n'
    )
    env = load_recipe(str(recipe))[0].env
    assert isinstance(env, DatasetConfig) and env.reward == "package.module:score"


def test_differences_are_dotted_keys_with_both_values() -> None:
    left = {"a": 1, "b": {"c": 2, "d": [3]}, "only": 0}
    right = {"a": 1, "b": {"c": 5, "d": [3]}}
    assert differences(left, right) == {"b.c": (2, 5), "only": (0, None)}
    assert differences(left, left) == {}


def test_a_recipe_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_bytes(b"name = '\xff'")
    with pytest.raises(ConfigError, match=r"recipe r\.toml: is not valid TOML"):
        load_recipe(str(path))


def test_another_type_on_the_command_line_takes_over_the_keys_it_has() -> None:
    given = values(algo={"type": "grpo", "std": "batch", "num_epochs": 2, "loss": "gspo"})
    recipe = resolve(given, ["algo.type=rloo"], "t")
    assert (recipe.algo.type, recipe.algo.num_epochs, recipe.algo.loss.type) == ("rloo", 2, "gspo")
    raft = resolve(given, ["algo.type=raft"], "t").algo
    assert (raft.type, raft.num_epochs) == ("raft", 2)
    assert resolve(given, ["algo.type=preference"], "t").algo.loss.type == "dpo"


def test_a_key_of_another_type_is_still_an_error_in_a_recipe() -> None:
    with pytest.raises(ConfigError, match=r"algo\.std is unknown"):
        resolve(values(algo={"type": "rloo", "std": "batch"}), [], "t")


def test_a_loss_named_on_the_command_line_takes_settings_after_it() -> None:
    recipe = resolve(values(algo={"type": "rloo"}), ["algo.loss=cispo", "algo.loss.cap=5"], "t")
    assert (recipe.algo.loss.type, recipe.algo.loss.cap) == ("cispo", 5.0)

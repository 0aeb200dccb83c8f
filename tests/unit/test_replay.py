"""The recipe that a journal gives back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from posttrain.config import GrpoConfig, RlooConfig
from posttrain.config.losses import PpoClipConfig
from posttrain.errors import ConfigError
from posttrain.journal import Journal, RunHeader
from posttrain.recipe_files import load_recipe
from posttrain.replay import recorded_recipe

RECIPE = str(Path(__file__).parents[1] / "recipes/reverse.toml")


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    recipe, _ = load_recipe(RECIPE, ["algo.type=grpo", "algo.std=none", "threads=none"])
    header = RunHeader(
        recipe.model_dump(mode="json"), "0.1.0", {}, seed=0, threads=3, created_at="2026-01-01"
    )
    with Journal.create(tmp_path / "run", header) as journal:
        yield journal


def test_the_recorded_recipe_has_the_threads_that_the_run_had(journal: Journal) -> None:
    recipe = recorded_recipe(journal)
    assert recipe.threads == 3
    assert recipe.algo == GrpoConfig(std="none")
    assert (
        recipe.model_copy(update={"threads": None})
        == load_recipe(RECIPE, ["algo.type=grpo", "algo.std=none", "threads=none"])[0]
    )


def test_overrides_do_not_change_what_the_journal_says(journal: Journal) -> None:
    assert recorded_recipe(journal, ["algo.loss.clip_low=0.1"]).algo.loss.clip_low == 0.1
    assert recorded_recipe(journal).algo == GrpoConfig(std="none")
    assert journal.header.recipe["algo"]["loss"]["clip_low"] == 0.2


@pytest.mark.parametrize("spelling", ["algo.type=rloo", 'algo.type="rloo"', "algo.type= rloo"])
def test_another_algorithm_takes_the_keys_it_has(spelling: str, journal: Journal) -> None:
    recipe = recorded_recipe(journal, [spelling, "algo.loss.clip_high=0.5"])
    assert recipe.algo == RlooConfig(loss=PpoClipConfig(clip_high=0.5))


@pytest.mark.parametrize("kind", ["gpg", "gae", "raft", "preference", "reinforce", "max_rl"])
def test_keys_that_nobody_set_do_not_stand_in_another_algorithms_way(
    kind: str, journal: Journal
) -> None:
    assert recorded_recipe(journal, [f"algo.type={kind}"]).algo.type == kind


def test_an_unknown_algorithm_is_still_named(journal: Journal) -> None:
    with pytest.raises(ConfigError, match=r"algo\.type is 'ppo'; use one of rloo, .*grpo"):
        recorded_recipe(journal, ["algo.type=ppo"])

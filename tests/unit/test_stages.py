"""Models that recipes take from other recipes: trained once, reused, and made anew when due."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from posttrain import recipe_files, stages
from posttrain.config import Recipe
from posttrain.errors import ConfigError, ModelError
from posttrain.recipe_files import load_recipe
from posttrain.replay import rebuild
from posttrain.run import train
from posttrain.stages import prepare
from posttrain.telemetry.observer import SilentObserver
from posttrain.training.models import resolve_model
from posttrain.training.models.hub import trained_folder
from posttrain.training.policy import load_policy

Write = Callable[..., Recipe]


class Told(SilentObserver):
    """Remembers messages and counts the steps that were trained."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.num_steps = 0

    def message(self, text: str) -> None:
        self.messages.append(text)

    def step(self, step: int, num_steps: int, metrics: Any) -> None:
        self.num_steps += 1


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("POSTTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    before = torch.are_deterministic_algorithms_enabled()
    yield tmp_path / "cache"
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write NAME.toml, two steps of imitation, and load it: write("b", "recipe:a.toml")."""
    rows = [{"prompt": f"p{i}", "completion": f"a{i}"} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def build(name: str, model: str = "tiny-char", **sections: Any) -> Recipe:
        values: dict[str, Any] = {
            "name": name,
            "threads": 1,
            "num_steps": 2,
            "model": {"path": model, "dtype": "float32"},
            "data": {"type": "demonstrations", "path": "rows.jsonl"},
            "algo": {"type": "sft"},
            "optim": {"lr": 1e-3},
            "rollout": {"groups_per_step": 2},
            "eval": {"before": False, "after": False},
            "checkpoint": {"every": 1},
            **sections,
        }
        values = {key: value for key, value in values.items() if value is not None}
        (tmp_path / f"{name}.toml").write_text(tomli_w.dumps(values))
        return load_recipe(str(tmp_path / f"{name}.toml"))[0]

    return build


def prepared(recipe: Recipe) -> Told:
    told = Told()
    asyncio.run(prepare(recipe, told))
    return told


def weights(path: str) -> dict[str, torch.Tensor]:
    return dict(load_policy(resolve_model(path), dtype="float32").model.state_dict())


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def test_a_stage_is_trained_once_and_then_reused(write: Write, cache: Path) -> None:
    write("a")
    recipe = write("b", "recipe:a.toml")
    first, again = prepared(recipe), prepared(recipe)
    assert (first.num_steps, again.num_steps, again.messages) == (2, 0, [])
    assert "training it once (2 steps)" in first.messages[0]
    assert [p.name for p in (cache / "recipes").iterdir()] == [
        trained_folder(recipe.model.path).name
    ], "nothing is left of its run"


def test_a_recipe_goes_on_from_exactly_what_its_stage_trained(write: Write, tmp_path: Path) -> None:
    stage, recipe = write("a"), write("b", "recipe:a.toml")
    prepared(recipe)
    alone = asyncio.run(
        train(stage, tmp_path, tmp_path / "alone", resume=False, observer=SilentObserver())
    )
    assert alone["steps"] == 2
    trainable, _ = rebuild(tmp_path / "alone", None, SilentObserver())
    assert same(dict(trainable.policy.model.state_dict()), weights(recipe.model.path))
    assert not same(weights("tiny-char"), weights(recipe.model.path))
    summary = asyncio.run(
        train(recipe, tmp_path, tmp_path / "run", resume=False, observer=SilentObserver())
    )
    assert summary["exit_reason"] == "finished"


def test_an_interrupted_stage_goes_on_where_it_was(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("a", num_steps=3)
    recipe = write("b", "recipe:a.toml")

    class Stop(Told):
        def step(self, step: int, num_steps: int, metrics: Any) -> None:
            super().step(step, num_steps, metrics)
            if step == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(prepare(recipe, Stop()))
    with pytest.raises(ModelError, match=r"not in the cache"):
        resolve_model(recipe.model.path)
    assert prepared(recipe).num_steps == 1
    interrupted = weights(recipe.model.path)
    monkeypatch.setenv("POSTTRAIN_CACHE", str(Path.cwd() / "other"))
    prepared(recipe)
    assert same(weights(recipe.model.path), interrupted)


def test_an_export_that_was_interrupted_is_made_again_without_training(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("a")
    recipe = write("b", "recipe:a.toml")
    whole = stages._export

    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stages, "_export", dies)
    with pytest.raises(KeyboardInterrupt):
        prepared(recipe)
    monkeypatch.setattr(stages, "_export", whole)
    assert prepared(recipe).num_steps == 0
    weights(recipe.model.path)


def test_a_changed_recipe_is_another_model(write: Write) -> None:
    write("a")
    recipe = write("b", "recipe:a.toml")
    prepared(recipe)
    before = trained_folder(recipe.model.path)
    write("a", optim={"lr": 2e-3})
    assert trained_folder(recipe.model.path) != before
    assert prepared(recipe).num_steps == 2
    write("a")
    assert trained_folder(recipe.model.path) == before and prepared(recipe).num_steps == 0


def test_changed_rows_make_another_model_and_moved_ones_do_not(
    write: Write, tmp_path: Path
) -> None:
    write("a")
    recipe = write("b", "recipe:a.toml")
    before = trained_folder(recipe.model.path)
    rows = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(rows.replace("p1", "q1"))
    assert trained_folder(recipe.model.path) != before
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "rows.jsonl").write_text(rows)
    (tmp_path / "moved" / "a.toml").write_text((tmp_path / "a.toml").read_text())
    assert trained_folder("recipe:moved/a.toml") == before


def test_a_stage_is_made_anew_when_the_one_below_it_changed(write: Write) -> None:
    write("a")
    write("b", "recipe:a.toml")
    recipe = write("c", "recipe:b.toml")
    assert prepared(recipe).num_steps == 4
    write("a", seed=1)
    assert prepared(recipe).num_steps == 4


def test_stages_of_model_and_teacher_are_both_trained(write: Write) -> None:
    write("a")
    write("t", seed=3)
    algo = {"type": "distill", "teacher": "recipe:t.toml"}
    recipe = write("b", "recipe:a.toml", algo=algo, env={"type": "reverse"}, data=None)
    assert prepared(recipe).num_steps == 4
    assert not same(weights(recipe.model.path), weights(recipe.algo.teacher))  # type: ignore[union-attr]


@pytest.mark.parametrize("chain", [("a",), ("a", "b"), ("a", "b", "c")])
def test_recipes_that_need_each_other_are_refused(
    chain: tuple[str, ...], write: Write, cache: Path
) -> None:
    for name, needed in zip(chain, (*chain[1:], chain[0]), strict=True):
        recipe = write(name, f"recipe:{needed}.toml")
    with pytest.raises(ConfigError) as refused:
        prepared(recipe)
    message = str(refused.value)
    assert "would be trained from itself (" in message and "begin with another model" in message
    assert message.count(" -> ") == len(chain)
    assert not (cache / "recipes").exists()


def test_an_unknown_recipe_is_named_with_those_that_there_are(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"recipe .*nope\S*: neither a shipped name nor a file"):
        prepared(write("b", "recipe:nope"))


def test_a_stage_that_is_missing_is_said_by_what_only_reads_models(write: Write) -> None:
    write("a")
    recipe = write("b", "recipe:a.toml")
    with pytest.raises(ModelError, match=r"not in the cache .*posttrain train makes it first"):
        resolve_model(recipe.model.path)


def test_the_file_of_a_stage_is_found_beside_the_recipe_that_names_it(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("a")
    write("b", "recipe:a.toml")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    recipe = load_recipe("../b.toml")[0]
    assert recipe.model.path == f"recipe:{tmp_path / 'a.toml'}"
    assert prepared(recipe).num_steps == 2


def test_a_users_recipe_begins_with_what_a_shipped_one_trains_in_any_cache(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("sft")
    shipped = {"sft": tmp_path / "sft.toml"}
    monkeypatch.setattr(recipe_files, "shipped_recipes", lambda: shipped)
    recipe = write("mine", "recipe:sft")
    assert recipe.model.path == "recipe:sft"
    for name in ("cache", "other"):
        monkeypatch.setenv("POSTTRAIN_CACHE", str(tmp_path / name))
        assert prepared(recipe).num_steps == 2
        assert trained_folder("recipe:sft").is_relative_to(tmp_path / name)
        assert prepared(recipe).num_steps == 0

"""Models that a recipe takes from other recipes: trained once, kept in the cache."""

from __future__ import annotations

import shutil
from pathlib import Path

from posttrain.config import Recipe
from posttrain.recipe_files import RECIPE, load_recipe, trained_models
from posttrain.replay import rebuild
from posttrain.run import train
from posttrain.telemetry.observer import Observer
from posttrain.training.models.hub import trained_folder
from posttrain.training.models.store import build_in_place


async def prepare(recipe: Recipe, observer: Observer) -> None:
    """Train and export what `model.path` and `algo.teacher` name as "recipe:NAME", if missing.

    An interrupted stage goes on where it was. Raises ConfigError for a recipe that needs itself.
    """
    for path in trained_models(recipe):
        await _prepare(path, observer)


async def _prepare(path: str, observer: Observer) -> None:
    folder = trained_folder(path)
    if folder.is_dir():
        return
    recipe, base_dir = load_recipe(path.removeprefix(RECIPE), [])
    await prepare(recipe, observer)
    run_dir = folder.with_name(folder.name + ".run")
    observer.message(f"{path} is not in the cache yet; training it once ({recipe.num_steps} steps)")
    await train(
        recipe, base_dir, run_dir, resume=(run_dir / "journal.sqlite").exists(), observer=observer
    )
    _export(run_dir, folder, observer)
    shutil.rmtree(run_dir, ignore_errors=True)
    observer.message(f"{path} is in {folder}")


def _export(run_dir: Path, folder: Path, observer: Observer) -> None:
    trainable, _ = rebuild(run_dir, None, observer)
    policy, masters = trainable.policy, trainable.learner.masters
    folder.parent.mkdir(parents=True, exist_ok=True)
    build_in_place(folder, lambda partial: policy.export(partial, policy.dtype, masters))

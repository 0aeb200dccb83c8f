"""posttrain export."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.commands.display import observer_for
from posttrain.config import RewardModelConfig
from posttrain.errors import ConfigError, RunDirectoryError, StorageError
from posttrain.recipe_files import RECIPE

if TYPE_CHECKING:
    from posttrain.build import Trainable

DTYPES = ("bfloat16", "float32")


def export_command(run: Path, to: Path, step: int | None, dtype: str | None, adapter: bool) -> None:
    """Rebuild the policy and write it: whole, or its adapter alone."""
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype is {dtype}; use {' or '.join(DTYPES)}")
    refuse_used(to)
    if adapter:
        _refuse_without_adapter(run)
    from posttrain.replay import rebuild

    with observer_for(False, 0) as observer:
        trainable, recipe = rebuild(run, step, observer)
    base = "AutoModelForCausalLM.from_pretrained"
    if isinstance(recipe.algo, RewardModelConfig):
        base = "AutoModelForSequenceClassification.from_pretrained"
    if adapter:
        name = recipe.model.path
        base_name = str(trainable.policy.folder) if name.startswith(RECIPE) else name
        write_adapter(trainable, to, dtype, base_name)
        hint = f'PeftModel.from_pretrained({base}("{trainable.policy.folder}"), "{to}")'
    else:
        write_folder(trainable, to, dtype)
        hint = f'{base}("{to}")'
        if not isinstance(recipe.algo, RewardModelConfig):
            hint += f", or model.path={to} in a recipe"
    what = "the adapter of " if adapter else ""
    print(f"exported {what}policy version {trainable.learner.policy_version} to {to}")
    print(f"next: {hint}")


def write_folder(trainable: Trainable, to: Path, dtype: str | None) -> None:
    """A Hugging Face folder. It is whole or absent. Raises StorageError when the disk refuses."""
    policy, chosen = trainable.policy, _torch_dtype(trainable, dtype)
    scorer, masters = trainable.learner.scorer, trainable.learner.masters
    if "scores_N" in trainable.algorithm.columns and scorer is not None:
        from posttrain.training.heads import export_reward_model

        _write(to, lambda folder: export_reward_model(policy, scorer, folder, chosen, masters))
    else:
        _write(to, lambda folder: policy.export(folder, chosen, masters))


def write_adapter(trainable: Trainable, to: Path, dtype: str | None, base_name: str) -> None:
    """The adapter in peft's format, for the base model `base_name`; else as `write_folder`."""
    policy, chosen = trainable.policy, _torch_dtype(trainable, dtype)
    masters = trainable.learner.masters
    _write(to, lambda folder: policy.export_adapter(folder, chosen, masters, base_name))


def _torch_dtype(trainable: Trainable, dtype: str | None) -> Any:
    import torch

    return getattr(torch, dtype) if dtype else trainable.policy.dtype


def _write(to: Path, build: Callable[[Path], None]) -> None:
    from safetensors import SafetensorError

    from posttrain.training.models.store import build_in_place

    refuse_used(to)
    try:
        build_in_place(to, build)
    except SafetensorError as error:  # what a full disk is to safetensors
        raise StorageError(f"export folder {to}: cannot be written: {error}; make room") from error


def _refuse_without_adapter(run: Path) -> None:
    """Before the run is rebuilt, which may take long."""
    from posttrain.journal import Journal
    from posttrain.replay import recorded_recipe

    with Journal.open(run, readonly=True) as journal:
        recipe = recorded_recipe(journal)
        if isinstance(recipe.algo, RewardModelConfig):
            raise ConfigError(
                f"run {run} trained a reward model, and peft's format has no place for its head; "
                "leave --adapter out and export the merged model"
            )
        if recipe.model.lora is None:
            raise ConfigError(
                f"run {run} trained every weight of its model, so it has no adapter; leave "
                "--adapter out and export the whole model"
            )


def refuse_used(to: Path) -> None:
    """Raise RunDirectoryError when something is in the way of a new folder `to`."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise RunDirectoryError(
            f"export folder {to} already exists and is not empty; choose another"
        )

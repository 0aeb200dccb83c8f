"""posttrain export."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.commands.display import observer_for
from posttrain.errors import ConfigError, RunDirectoryError, StorageError

if TYPE_CHECKING:
    from posttrain.build import Trainable

DTYPES = ("bfloat16", "float32")


def export_command(run: Path, to: Path, step: int | None, dtype: str | None) -> None:
    """Rebuild the policy and write it."""
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype is {dtype}; use {' or '.join(DTYPES)}")
    refuse_used(to)
    from posttrain.replay import rebuild

    with observer_for(False, 0) as observer:
        trainable, _ = rebuild(run, step, observer)
    write_folder(trainable, to, dtype)
    print(f"exported policy version {trainable.learner.policy_version} to {to}")
    print(f'next: AutoModelForCausalLM.from_pretrained("{to}"), or model.path={to} in a recipe')


def write_folder(trainable: Trainable, to: Path, dtype: str | None) -> None:
    """The folder is whole or absent. Raises StorageError when the disk refuses."""
    import torch
    from safetensors import SafetensorError

    from posttrain.training.models.store import build_in_place

    refuse_used(to)
    policy = trainable.policy
    chosen = getattr(torch, dtype) if dtype else policy.dtype
    try:
        build_in_place(
            to,
            lambda folder: policy.export(folder, chosen, trainable.learner.masters),
        )
    except SafetensorError as error:  # what a full disk is to safetensors
        raise StorageError(f"export folder {to}: cannot be written: {error}; make room") from error


def refuse_used(to: Path) -> None:
    """Raise RunDirectoryError when something is in the way of a new folder `to`."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise RunDirectoryError(
            f"export folder {to} already exists and is not empty; choose another"
        )

"""posttrain export."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.commands.display import observer_for
from posttrain.errors import ConfigError, RunDirectoryError, StorageError

if TYPE_CHECKING:
    from posttrain.training.policy import Policy

DTYPES = ("bfloat16", "float32")


def export_command(run: Path, to: Path, step: int | None, dtype: str | None) -> None:
    """Rebuild the policy and write it."""
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype is {dtype}; use {' or '.join(DTYPES)}")
    _refuse_used(to)
    from posttrain.replay import rebuild

    with observer_for(False, 0) as observer:
        trainable, _ = rebuild(run, step, observer)
    write_folder(trainable.policy, to, dtype)
    print(f"exported policy version {trainable.learner.policy_version} to {to}")
    print(f'next: AutoModelForCausalLM.from_pretrained("{to}"), or model.path={to} in a recipe')


def write_folder(policy: Policy, to: Path, dtype: str | None) -> None:
    """Write beside, then rename: the folder is whole or absent."""
    import torch

    _refuse_used(to)
    partial = to.with_name(to.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        policy.export(partial, getattr(torch, dtype) if dtype else policy.dtype)
        if to.is_dir():
            to.rmdir()
        os.replace(partial, to)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise StorageError(f"export folder {to}: cannot be written: {error}; make room") from error


def _refuse_used(to: Path) -> None:
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise RunDirectoryError(
            f"export folder {to} already exists and is not empty; choose another"
        )

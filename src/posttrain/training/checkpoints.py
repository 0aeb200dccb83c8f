"""Checkpoints of the learner: written beside, renamed into place, recorded in the journal.

A folder that the journal does not know was left by a crash and is removed. Losing every checkpoint
loses no training: the journal is redone from the model the run began with.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from safetensors import SafetensorError

from posttrain.errors import JournalCorruptError, StorageError
from posttrain.journal import Journal
from posttrain.protocols import Learner


class CheckpointStore:
    """The folder `checkpoints/` of a run."""

    def __init__(self, run_dir: Path, journal: Journal, *, every: int, keep: int) -> None:
        self._folder = run_dir / "checkpoints"
        self._journal = journal
        self._every = every
        self._keep = keep

    def clean(self) -> None:
        """Remove what a crash left half-made."""
        known = {record.folder for record in self._journal.checkpoints()}
        if self._folder.is_dir():
            for entry in self._folder.iterdir():
                if entry.is_dir() and f"checkpoints/{entry.name}" not in known:
                    shutil.rmtree(entry)

    def restore_newest(self, learner: Learner, at_most: int | None = None) -> int:
        """Restore the newest checkpoint on disk, not after step `at_most`; 0 without one.

        Raises JournalCorruptError when it does not hold the weights that the journal recorded.
        """
        for record in sorted(self._journal.checkpoints(), key=lambda r: r.step, reverse=True):
            folder = self._folder.parent / record.folder
            if folder.is_dir() and (at_most is None or record.step <= at_most):
                try:
                    learner.restore(folder)
                except (OSError, ValueError, KeyError) as error:
                    raise JournalCorruptError(
                        f"checkpoint {folder}: cannot be read ({type(error).__name__}: {error}); "
                        "delete that folder and resume: an earlier one is redone from the journal"
                    ) from error
                state = (learner.policy_version, learner.weights_hash())
                if state != (record.step, record.state_hash):
                    raise JournalCorruptError(
                        f"checkpoint {folder}: holds version {state[0]} with weights "
                        f"{state[1][:12]}, but the journal recorded {record.state_hash[:12]} after "
                        f"step {record.step}; delete that folder and resume"
                    )
                return record.step
        return 0

    def after_step(self, learner: Learner, num_steps: int) -> None:
        """Save when a multiple of `every` is reached, and at the end."""
        step = learner.policy_version
        if step % self._every == 0 or step == num_steps:
            self.save(learner)

    def save(self, learner: Learner) -> None:
        """Save now. Raises StorageError naming path and free space; older ones stay intact."""
        step = learner.policy_version
        name = f"step-{step:06d}"
        partial, final = self._folder / f"{name}.partial", self._folder / name
        if final.is_dir() and any(r.step == step for r in self._journal.checkpoints()):
            return
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            learner.save(partial)
            _sync_folder(partial)
            os.replace(partial, final)
            _sync(self._folder)
        except (
            OSError,
            SafetensorError,
        ) as error:  # safetensors wraps ENOSPC in an error of its own
            shutil.rmtree(partial, ignore_errors=True)
            free = shutil.disk_usage(self._folder.parent).free
            raise StorageError(
                f"checkpoint {final}: cannot be written ({error}); {free / 1e6:.0f} MB are free. "
                "Make room or choose another --run-dir, then resume: no sample is lost"
            ) from error
        self._journal.record_checkpoint(step, f"checkpoints/{name}", learner.weights_hash())
        self._prune()

    def _prune(self) -> None:
        records = sorted(self._journal.checkpoints(), key=lambda r: r.step)
        for record in records[: -self._keep]:
            self._journal.forget_checkpoint(record.step)
            shutil.rmtree(self._folder.parent / record.folder, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    """Flush a folder and all that is in it."""
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Checkpoints: whole or absent, the newest that is there, and never more than asked for."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import SafetensorError

from posttrain.errors import JournalCorruptError, StorageError
from posttrain.training.checkpoints import CheckpointStore


class NotedCheckpoints:
    """The journal's checkpoint table."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[str, str]] = {}

    def checkpoints(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(step=s, folder=f, state_hash=h) for s, (f, h) in self.rows.items()]

    def record_checkpoint(self, step: int, folder: str, state_hash: str) -> None:
        self.rows[step] = (folder, state_hash)

    def forget_checkpoint(self, step: int) -> None:
        del self.rows[step]


class CountingLearner:
    """Its whole state is its version."""

    def __init__(self) -> None:
        self.policy_version = 0
        self.fails: OSError | None = None

    def weights_hash(self) -> str:
        return f"{self.policy_version:064d}"

    def save(self, folder: Path) -> None:
        (folder / "state").write_text(str(self.policy_version))
        if self.fails:
            raise self.fails

    def restore(self, folder: Path) -> None:
        self.policy_version = int((folder / "state").read_text())


@pytest.fixture
def journal() -> NotedCheckpoints:
    return NotedCheckpoints()


@pytest.fixture
def learner() -> CountingLearner:
    return CountingLearner()


@pytest.fixture
def store(tmp_path: Path, journal: Any) -> CheckpointStore:
    return CheckpointStore(tmp_path, journal, every=2, keep=2)


def run_to(store: CheckpointStore, learner: Any, last: int, num_steps: int = 100) -> None:
    for step in range(learner.policy_version + 1, last + 1):
        learner.policy_version = step
        store.after_step(learner, num_steps)


def names(tmp_path: Path) -> list[str]:
    return sorted(p.name for p in (tmp_path / "checkpoints").iterdir())


def test_every_nth_step_and_the_last_are_saved_and_only_the_newest_kept(
    store: CheckpointStore, learner: Any, journal: NotedCheckpoints, tmp_path: Path
) -> None:
    run_to(store, learner, 7, num_steps=7)
    assert names(tmp_path) == ["step-000006", "step-000007"]
    assert sorted(journal.rows) == [6, 7]
    assert journal.rows[7] == ("checkpoints/step-000007", f"{7:064d}")


def test_the_newest_one_on_disk_is_restored(
    store: CheckpointStore, learner: Any, tmp_path: Path
) -> None:
    run_to(store, learner, 9)
    assert store.restore_newest(learner) == learner.policy_version == 8
    assert store.restore_newest(learner, at_most=7) == learner.policy_version == 6
    assert store.restore_newest(learner, at_most=5) == 0


def test_a_folder_that_the_user_deleted_falls_back_to_the_one_before(
    store: CheckpointStore, learner: Any, tmp_path: Path
) -> None:
    """What the error of a damaged checkpoint tells the user to do must work."""
    run_to(store, learner, 8)
    for path in (tmp_path / "checkpoints" / "step-000008").iterdir():
        path.unlink()
    (tmp_path / "checkpoints" / "step-000008").rmdir()
    assert store.restore_newest(learner) == learner.policy_version == 6
    run_to(store, learner, 8)
    assert store.restore_newest(learner) == 8, "and the redone step is saved again"


def test_a_folder_with_other_weights_than_the_journal_recorded_is_refused(
    store: CheckpointStore, learner: Any, tmp_path: Path
) -> None:
    run_to(store, learner, 4)
    (tmp_path / "checkpoints" / "step-000004" / "state").write_text("2")
    with pytest.raises(JournalCorruptError, match="holds version 2.*after step 4.*delete"):
        store.restore_newest(learner)


def test_without_a_checkpoint_the_learner_stays_as_it_is(
    store: CheckpointStore, learner: Any
) -> None:
    assert store.restore_newest(learner) == learner.policy_version == 0


def test_what_a_crash_left_half_made_is_removed_and_the_rest_kept(
    store: CheckpointStore, learner: Any, tmp_path: Path
) -> None:
    """A partial folder, and one that was renamed but not yet journalled."""
    run_to(store, learner, 2)
    for name in ("step-000004.partial", "step-000004"):
        (tmp_path / "checkpoints" / name).mkdir()
        (tmp_path / "checkpoints" / name / "state").write_text("4")
    (tmp_path / "checkpoints" / ".DS_Store").write_text("not ours")
    store.clean()
    assert [n for n in names(tmp_path) if n.startswith("step")] == ["step-000002"]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left"), SafetensorError("I/O error: No space left")]
)
def test_a_full_disk_stops_with_a_remedy_and_leaves_the_older_ones(
    error: Any, store: CheckpointStore, learner: Any, journal: NotedCheckpoints, tmp_path: Path
) -> None:
    run_to(store, learner, 2)
    learner.fails = error
    with pytest.raises(StorageError, match="step-000004.*Make room.*no sample is lost"):
        run_to(store, learner, 4)
    assert names(tmp_path) == ["step-000002"] and sorted(journal.rows) == [2]


def test_saving_the_same_step_twice_keeps_the_first(
    store: CheckpointStore, learner: Any, tmp_path: Path
) -> None:
    run_to(store, learner, 2)
    store.save(learner)
    assert names(tmp_path) == ["step-000002"]

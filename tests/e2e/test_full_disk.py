"""A disk that takes no more: a clear error at once, and the run goes on when there is room."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain.journal import Journal, verify_segments


def journalled_groups(run_dir: Path) -> int:
    """Groups that are there and whole."""
    assert verify_segments(run_dir) == []
    with Journal.open(run_dir, readonly=True) as journal:
        found = [d for d in journal.draws() if d.group is not None]
        for record in found:
            assert len(journal.group(record.draw.draw_id)) == 8
        assert journal.ledger().balanced
    return len(found)


@pytest.mark.parametrize(
    ("max_file_bytes", "checkpoint_every", "culprit"),
    [
        (300_000, 1000, "journal.sqlite"),
        (240_000, 1, "checkpoints/step-000001"),
    ],
    ids=["the journal", "a checkpoint"],
)
def test_a_file_that_cannot_grow_stops_the_run_and_loses_nothing(
    max_file_bytes: int,
    checkpoint_every: int,
    culprit: str,
    zygote: Any,
    argv: Any,
    outcome: Any,
    tmp_path: Path,
    reference: Path,
) -> None:
    command = argv(tmp_path / "run", f"checkpoint.every={checkpoint_every}")
    stopped = zygote.run(*command, cwd=tmp_path, max_file_bytes=max_file_bytes)
    assert stopped.status == 1, stopped.err
    assert "Traceback" not in stopped.err
    assert str(tmp_path / "run" / culprit) in stopped.err and "resume" in stopped.err
    assert journalled_groups(tmp_path / "run") >= 4, "a step at least was recorded"
    assert not list((tmp_path / "run").glob("**/*.partial"))
    done = zygote.run(*command, cwd=tmp_path)
    assert done.status == 0, done.err
    assert outcome(tmp_path / "run").weights_hash == outcome(reference).weights_hash


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_names_the_path_and_more_space_is_all_it_takes(
    small_disk: Path, zygote: Any, argv: Any, outcome: Any, tmp_path: Path, reference: Path
) -> None:
    command = argv(small_disk / "run")
    stopped = zygote.run(*command, cwd=tmp_path)
    assert stopped.status == 1, stopped.err
    assert "Traceback" not in stopped.err and stopped.err.startswith("error: ")
    assert str(small_disk / "run") in stopped.err
    groups = journalled_groups(small_disk / "run")
    assert groups >= 4
    again = zygote.run(*command, cwd=tmp_path)
    assert again.status == 1, "still full"
    assert journalled_groups(small_disk / "run") >= groups
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    done = zygote.run(*command, cwd=tmp_path)
    assert done.status == 0, done.err
    assert outcome(small_disk / "run") == outcome(reference)

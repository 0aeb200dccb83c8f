"""A folder is whole or absent, whatever dies and however many processes want it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from posttrain.errors import NetworkError, StorageError
from posttrain.training.models.store import build_in_place

# A child that stops at one point of a build, says so, and waits to be killed.
_CHILD = """
import os, sys
from pathlib import Path
from posttrain.training.models import store
target, stop_at = Path(sys.argv[1]), sys.argv[2]
def stop():
    print("here", flush=True)
    sys.stdin.read()
def build(folder):
    (folder / "first").write_text("new")
    if stop_at == "build":
        stop()
    (folder / "second").write_text("new")
renames, rename = 0, os.rename
def stopping_rename(old, new):
    global renames
    renames += 1
    if stop_at == f"rename{renames}":
        stop()
    rename(old, new)
store.os.rename = stopping_rename
store.build_in_place(target, build)
"""


def _kill_child_at(stop_at: str, target: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(target), stop_at],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"here\n"
        child.send_signal(signal.SIGKILL)


def _fill(folder: Path) -> None:
    (folder / "first").write_text("whole")
    (folder / "second").write_text("whole")


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("stop_at", ["build", "rename1"])
def test_a_killed_build_is_never_seen_and_the_next_one_cleans_up(
    stop_at: str, tmp_path: Path
) -> None:
    target = tmp_path / "model"
    _kill_child_at(stop_at, target)
    assert not target.exists()
    build_in_place(target, _fill)
    assert {path.read_text() for path in target.iterdir()} == {"whole"}
    assert _names(tmp_path) == ["model"]  # neither leftovers nor a lock file


@pytest.mark.parametrize(("stop_at", "stands"), [("build", True), ("rename2", False)])
def test_a_kill_while_replacing_leaves_the_old_folder_or_none(
    stop_at: str, stands: bool, tmp_path: Path
) -> None:
    target = tmp_path / "model"
    build_in_place(target, _fill)
    _kill_child_at(stop_at, target)
    assert target.exists() == stands
    if stands:
        assert {path.read_text() for path in target.iterdir()} == {"whole"}
    build_in_place(target, _fill)
    assert _names(tmp_path) == ["model"] and _names(target) == ["first", "second"]


def test_many_at_once_build_once(tmp_path: Path) -> None:
    target, builds = tmp_path / "model", []

    def build(folder: Path) -> None:
        builds.append(folder)
        _fill(folder)

    threads = [
        threading.Thread(
            target=build_in_place, args=(target, build), kwargs={"is_ready": target.exists}
        )
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1
    assert _names(tmp_path) == ["model"]


def test_a_second_process_waits_for_the_first(tmp_path: Path) -> None:
    """The second is started while the first holds the lock, and finds the work done."""
    target = tmp_path / "model"
    code = (
        "import sys; from pathlib import Path; from posttrain.training.models import store\n"
        "t = Path(sys.argv[1]); print('up', flush=True)\n"
        "store.build_in_place(t, lambda f: sys.exit('built twice'), is_ready=t.exists)"
    )
    second: list[subprocess.Popen[bytes]] = []

    def build(folder: Path) -> None:
        child = subprocess.Popen([sys.executable, "-c", code, str(target)], stdout=subprocess.PIPE)
        second.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        _fill(folder)

    build_in_place(target, build)
    with second[0] as child:
        assert child.wait() == 0


def test_a_build_that_fails_leaves_no_trace_and_its_error_passes(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        _fill(folder)
        raise NetworkError("no network")

    with pytest.raises(NetworkError, match="no network"):
        build_in_place(tmp_path / "model", build)
    assert _names(tmp_path) == []


def test_content_is_on_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut after the rename must not show empty files."""
    events: list[int | str] = []  # inodes in the order they were synced
    inodes: dict[str, int] = {}
    sync, rename = os.fsync, os.rename

    def build(folder: Path) -> None:
        _fill(folder)
        inodes.update({path.name: path.stat().st_ino for path in folder.iterdir()})

    def record_sync(descriptor: int) -> None:
        events.append(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def record_rename(old: Path, new: Path) -> None:
        events.append("rename")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "rename", record_rename)
    build_in_place(tmp_path / "model", build)
    at = events.index("rename")
    assert set(inodes.values()) <= set(events[:at])
    assert events[at + 1 :] == [tmp_path.stat().st_ino]


def test_a_full_disk_is_named_with_its_remedy(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "model.safetensors"))

    with pytest.raises(StorageError, match=r"No space left.*free some space"):
        build_in_place(tmp_path / "model", build)
    assert _names(tmp_path) == []


def test_a_place_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        build_in_place(tmp_path / "file" / "models" / "m", _fill)

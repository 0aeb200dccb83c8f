"""One writer for each run directory, by a lock that the operating system drops at death."""

from __future__ import annotations

import fcntl
import os
import socket
import weakref
from contextlib import suppress
from pathlib import Path

from posttrain.errors import RunDirectoryError
from posttrain.journal.storage import storage_errors

LOCK_NAME = "journal.lock"


class WriterLock:
    """An exclusive flock on the run directory, held until `release` or the death of the process.

    The lock is on the folder, not on a file in it that somebody may delete; `journal.lock` only
    says "pid host" of the latest owner. Raises RunDirectoryError when another writer holds it (in
    this process too) and StorageError when the folder cannot be written.
    """

    def __init__(self, run_dir: Path) -> None:
        path = run_dir / LOCK_NAME
        with storage_errors(path, "take the writer lock"):
            self._folder = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
            self._descriptor = -1
            try:
                self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
                self._take(run_dir)
            except BaseException:
                self.abandon()
                raise
        _held.add(self)

    def _take(self, run_dir: Path) -> None:
        try:
            fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _owner_of(os.pread(self._descriptor, 400, 0))
            raise RunDirectoryError(
                f"run directory {run_dir} is being written by {owner}; wait for it to end, "
                "stop it, or use another run directory"
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        """Let the next writer in. Safe to call twice."""
        if self._descriptor >= 0:
            with suppress(OSError):  # the name in the file only informs; the lock is the flock
                os.ftruncate(self._descriptor, 0)
        self.abandon()

    def abandon(self) -> None:
        """Close this process's handle and leave the file alone: a forked child's part."""
        _held.discard(self)
        for descriptor in (self._descriptor, self._folder):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor = self._folder = -1


def writer_is_alive(run_dir: Path) -> bool:
    """Whether the process named in the lock file exists on this host.

    Reads only: probing the lock itself could turn a starting writer away.
    """
    try:
        fields = (run_dir / LOCK_NAME).read_text(encoding="utf-8", errors="replace").split()
    except FileNotFoundError:
        return False
    if len(fields) != 2 or not fields[0].isdigit() or fields[1] != socket.gethostname():
        return False
    try:
        os.kill(int(fields[0]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _owner_of(content: bytes) -> str:
    fields = content.decode("utf-8", "replace").split()
    if len(fields) != 2:
        return "another process"
    return f"pid {fields[0]} on host {fields[1]}"


def _release_in_child() -> None:
    # A forked worker that outlives a killed writer must not keep the lock from the next one.
    for lock in list(_held):
        lock.abandon()


_held: weakref.WeakSet[WriterLock] = weakref.WeakSet()
os.register_at_fork(after_in_child=_release_in_child)

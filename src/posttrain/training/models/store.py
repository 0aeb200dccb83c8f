"""Folders that are whole or absent, whatever kills the process that makes them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from posttrain.errors import StorageError


def build_in_place(
    target: Path, build: Callable[[Path], None], *, is_ready: Callable[[], bool] | None = None
) -> None:
    """Let `build` fill a folder beside `target`, then rename it to `target` in one step.

    One process builds at a time; the others wait. `is_ready` is asked once the lock is held: when
    it says True nothing is built, else whatever stands at `target` is replaced. What earlier,
    killed builds left behind is removed. Errors of `build` pass through and leave no trace.
    Raises StorageError when the disk refuses.
    """
    target = Path(os.path.abspath(target))
    with _storage_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / f".{target.name}.lock"):
            _remove_leftovers(target)
            if is_ready is not None and is_ready():
                return
            partial = Path(tempfile.mkdtemp(prefix=_prefix(target), dir=target.parent))
            try:
                build(partial)
                partial.chmod(0o755)  # mkdtemp makes it private
                _sync_tree(partial)
                _replace(partial, target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)


def _prefix(target: Path) -> str:
    return f".{target.name}.partial-"


def _remove_leftovers(target: Path) -> None:
    """Called under the lock, so no living process owns them."""
    for leftover in target.parent.glob(f"{_prefix(target)}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _replace(partial: Path, target: Path) -> None:
    if target.is_dir() and any(target.iterdir()):
        # A folder with content cannot be renamed over: it moves aside under a leftover's name,
        # so that a kill between the two renames leaves nothing that would ever be used.
        aside = Path(tempfile.mkdtemp(prefix=_prefix(target), dir=target.parent))
        os.rename(target, aside / "old")
        os.rename(partial, target)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        os.rename(partial, target)
    _sync(target.parent)


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; the kernel drops it when the process dies, however it dies.

    The file goes when the lock is released. A waiter may then hold the lock of a file that no
    longer has this name, so it looks again and starts over.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                break
        os.close(descriptor)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


@contextlib.contextmanager
def _storage_errors(target: Path) -> Iterator[None]:
    """An operating-system error about a file becomes a StorageError that names the folder."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        if error.errno is None:  # raised by our own code, for instance a NetworkError
            raise
        raise StorageError(
            f"folder {target} cannot be written: {error.strerror} ({error.filename}); "
            "free some space or name another place ($POSTTRAIN_CACHE for the model cache)"
        ) from error

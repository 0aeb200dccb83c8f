"""The edge to disk: what the operating system and SQLite refuse becomes an error with a remedy."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from posttrain.errors import JournalCorruptError, JournalError, PosttrainError, StorageError

_KEPT = "what was recorded before is kept"

_REMEDIES = {
    errno.ENOSPC: f"free some space, then run the same command with --resume; {_KEPT}",
    errno.EDQUOT: f"raise the disk quota, then run the same command with --resume; {_KEPT}",
    errno.EFBIG: f"raise the file size limit (ulimit -f), then use --resume; {_KEPT}",
    errno.EROFS: "the file system is read-only; use a run directory that can be written",
    errno.EACCES: "give this user write permission or use another run directory",
    errno.EPERM: "give this user write permission or use another run directory",
    errno.EIO: f"check the disk, its mount and `ulimit -f`, then use --resume; {_KEPT}",
    errno.ENOTDIR: "a file is in the way; use another run directory",
    errno.ENOLCK: "this file system has no locks; use a run directory on a local disk",
}

_SQLITE_STORAGE = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_READONLY: errno.EACCES,
    sqlite3.SQLITE_CANTOPEN: errno.EACCES,
    sqlite3.SQLITE_PERM: errno.EACCES,
}


@contextmanager
def storage_errors(path: Path, action: str) -> Iterator[None]:
    """Raise what `path` refused as StorageError, JournalCorruptError or JournalError.

    `action` completes "cannot ...", for instance "write 12 bytes".
    """
    try:
        yield
    except PosttrainError:
        raise
    except sqlite3.Error as cause:
        raise sqlite_error(path, action, cause) from cause
    except OSError as cause:
        raise os_error(path, action, cause) from cause


def os_error(path: Path, action: str, cause: OSError) -> StorageError:
    """A StorageError that keeps `errno` and says how much space is left."""
    remedy = _REMEDIES.get(cause.errno or 0, f"check the run directory; {_KEPT}")
    fact = cause.strerror or str(cause)
    error = StorageError(f"{path}: cannot {action}: {fact}{_free_space(path)}; {remedy}")
    error.errno = cause.errno
    return error


def sqlite_error(path: Path, action: str, cause: sqlite3.Error) -> PosttrainError:
    """The error of the tree that says what SQLite's primary result code means."""
    code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
    if code in _SQLITE_STORAGE:
        number = _SQLITE_STORAGE[code]
        error = StorageError(
            f"{path}: cannot {action}: {cause}{_free_space(path)}; {_REMEDIES[number]}"
        )
        error.errno = number
        return error
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return JournalCorruptError(
            f"{path}: cannot {action}: {cause}; restore the file from a copy, "
            "or start a new run directory"
        )
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return JournalError(
            f"{path}: cannot {action}: {cause}; another program holds the database: close it"
        )
    return JournalError(f"{path}: cannot {action}: {cause}; the journal refused it")


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free_space(path: Path) -> str:
    for folder in (path, *path.parents):
        try:
            stat = os.statvfs(folder)
        except OSError:
            continue  # the file or its folder does not exist; its parent tells
        return f" ({stat.f_bavail * stat.f_frsize:,} bytes free)"
    return ""

"""Connections to `journal.sqlite`: created in one piece, opened to write, opened to read only."""

from __future__ import annotations

import json
import os
import sqlite3
from pathlib import Path
from urllib.parse import quote

from posttrain.errors import JournalError, PosttrainError, StorageError
from posttrain.journal.schema import APPLICATION_ID, DDL, check_schema
from posttrain.journal.storage import sqlite_error, storage_errors, sync_folder
from posttrain.types import SCHEMA_VERSION

DATABASE_NAME = "journal.sqlite"
_BUILD_NAME = "journal.sqlite.new"
_SIDECARS = ("-wal", "-shm", "-journal")


def database_path(run_dir: Path) -> Path:
    """The database of a run directory, whether or not it exists."""
    return run_dir / DATABASE_NAME


def wal_path(run_dir: Path) -> Path:
    """SQLite's log beside the database; it exists while a writer lives or after it was killed."""
    return run_dir / (DATABASE_NAME + "-wal")


def create_database(run_dir: Path, header_json: str) -> None:
    """Write a complete database under another name, then rename it.

    A kill before the rename leaves what the next call sweeps away, a kill after it a complete
    journal. Call with the writer lock held.
    """
    build = run_dir / _BUILD_NAME
    with storage_errors(build, "create the journal"):
        _remove_build(run_dir)
        connection = sqlite3.connect(build, isolation_level=None)
        try:
            connection.execute("PRAGMA synchronous = FULL")
            connection.executescript(f"BEGIN; {DDL}")
            connection.execute("INSERT INTO meta VALUES ('header', ?)", (header_json,))
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            connection.execute("COMMIT")
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        finally:
            connection.close()
        if mode != "wal" or (run_dir / (_BUILD_NAME + "-wal")).exists():
            raise StorageError(
                f"{run_dir}: SQLite cannot keep a write-ahead log here (journal mode {mode}); "
                "use a run directory on a local disk, not on a network file system"
            )
        os.replace(build, database_path(run_dir))
        sync_folder(run_dir)


def open_to_write(run_dir: Path) -> sqlite3.Connection:
    """The connection of the one writer. Call with the writer lock held.

    Commits are process-safe at once; `set_durable` says whether they also wait for the disk.
    """
    path = database_path(run_dir)
    with storage_errors(path, "open the journal"):
        connection = sqlite3.connect(path, isolation_level=None)
        try:
            check_schema(connection, path)
            connection.execute("PRAGMA foreign_keys = ON")
            set_durable(connection, False)
        except BaseException:
            connection.close()
            raise
    return connection


def set_durable(connection: sqlite3.Connection, durable: bool) -> None:
    """Whether the next commits flush the log, and with it every commit before them."""
    connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")


class ReadConnection:
    """Reads a journal without writing a byte, whether or not a writer is at work.

    With a log file on disk (a live writer, or a dead one) the connection takes part in SQLite's
    locking and sees every commit. Without one nobody is writing; the database is then opened
    immutable, which needs no sidecar files and works in a read-only directory, and it is opened
    anew as soon as a writer's log appears.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._connection, self._immutable = self._open()

    def get(self) -> sqlite3.Connection:
        """The connection to use for one query."""
        if self._immutable and wal_path(self._run_dir).exists():
            self._connection.close()
            self._connection, self._immutable = self._open()
        return self._connection

    def close(self) -> None:
        self._connection.close()

    def _open(self) -> tuple[sqlite3.Connection, bool]:
        path = database_path(self._run_dir)
        if not wal_path(self._run_dir).exists():
            return _connect_read_only(path, "immutable=1"), True
        try:
            return _connect_read_only(path, "mode=ro"), False
        except PosttrainError as refusal:
            if not isinstance(refusal, StorageError):
                raise
            if _size(wal_path(self._run_dir)):
                raise JournalError(
                    f"{path} has a write-ahead log that cannot be read where it is ({refusal}); "
                    "copy the run directory to a place that can be written and read it there"
                ) from refusal
        return _connect_read_only(path, "immutable=1"), True


def _connect_read_only(path: Path, mode: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"file:{quote(str(path.absolute()))}?{mode}", uri=True, isolation_level=None
    )
    try:
        check_schema(connection, path)
    except sqlite3.Error as cause:
        connection.close()
        raise sqlite_error(path, "read the journal", cause) from cause
    except BaseException:
        connection.close()
        raise
    return connection


def to_json(what: str, value: object) -> str:
    """JSON in ASCII; NaN and infinities are written as Python does, numpy scalars as numbers.

    Raises JournalError that names `what`.
    """
    try:
        return json.dumps(value, separators=(",", ":"), default=_plain)
    except (TypeError, ValueError) as cause:
        raise JournalError(
            f"{what} cannot be recorded as JSON: {cause}; use strings, numbers, lists and dicts"
        ) from cause


def _plain(value: object) -> object:
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:
        return item()
    raise TypeError(f"a {type(value).__name__} has no JSON form")


def _remove_build(run_dir: Path) -> None:
    for suffix in ("", *_SIDECARS):
        (run_dir / (_BUILD_NAME + suffix)).unlink(missing_ok=True)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0

"""The tables of `journal.sqlite`, and the rules that SQLite itself enforces.

The same rules are checked in `journal.py`, with messages for people; the ones here hold against
every program that writes the file.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from posttrain.errors import RunDirectoryError, SchemaVersionError
from posttrain.types import SCHEMA_VERSION

APPLICATION_ID = 0x50544A31  # "PTJ1"

DDL = """
CREATE TABLE meta (
    key   TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE draws (
    draw_id  INTEGER PRIMARY KEY CHECK (draw_id >= 0),
    task_id  TEXT NOT NULL,
    epoch    INTEGER NOT NULL,
    seed     INTEGER NOT NULL,
    environment TEXT NOT NULL,
    status   TEXT NOT NULL DEFAULT 'open',
    step     INTEGER REFERENCES steps (step),
    position INTEGER,
    reason   TEXT,
    CHECK ((step IS NULL) = (position IS NULL)),
    CHECK (CASE status
        WHEN 'open'    THEN step IS NULL AND reason IS NULL
        WHEN 'trained' THEN step IS NOT NULL AND reason IS NULL
        WHEN 'dropped' THEN reason IS NOT NULL
        ELSE 0 END)
) STRICT;
CREATE INDEX open_draws ON draws (draw_id) WHERE status = 'open';
CREATE UNIQUE INDEX step_draws ON draws (step, position) WHERE step IS NOT NULL;
CREATE INDEX draws_by_outcome ON draws (status, reason);

CREATE TRIGGER draw_closed_once BEFORE UPDATE ON draws WHEN OLD.status <> 'open'
BEGIN SELECT RAISE(ABORT, 'a draw is trained once or dropped once'); END;
CREATE TRIGGER draw_kept BEFORE DELETE ON draws
BEGIN SELECT RAISE(ABORT, 'a draw is never deleted'); END;
CREATE TRIGGER trained_draw_has_group BEFORE UPDATE ON draws WHEN NEW.status = 'trained'
    AND NOT EXISTS (SELECT 1 FROM groups WHERE draw_id = NEW.draw_id)
BEGIN SELECT RAISE(ABORT, 'a draw without a recorded group cannot be trained'); END;

CREATE TABLE groups (
    draw_id            INTEGER PRIMARY KEY REFERENCES draws (draw_id),
    segment            INTEGER NOT NULL,
    offset             INTEGER NOT NULL,
    length             INTEGER NOT NULL,
    sha256             BLOB NOT NULL CHECK (length(sha256) = 32),
    num_trajectories   INTEGER NOT NULL,
    num_valid          INTEGER NOT NULL,
    num_sampled_tokens INTEGER NOT NULL,
    min_policy_version INTEGER NOT NULL,
    max_policy_version INTEGER NOT NULL,
    reward_mean        REAL
) STRICT;
CREATE UNIQUE INDEX groups_by_place ON groups (segment, offset);

CREATE TRIGGER group_of_open_draw BEFORE INSERT ON groups
    WHEN COALESCE((SELECT status FROM draws WHERE draw_id = NEW.draw_id), '') <> 'open'
BEGIN SELECT RAISE(ABORT, 'a group belongs to an open draw'); END;
CREATE TRIGGER group_fixed BEFORE UPDATE ON groups
BEGIN SELECT RAISE(ABORT, 'a recorded group never changes'); END;
CREATE TRIGGER trained_group_kept BEFORE DELETE ON groups
    WHEN (SELECT status FROM draws WHERE draw_id = OLD.draw_id) = 'trained'
BEGIN SELECT RAISE(ABORT, 'the group of a trained draw is never deleted'); END;

CREATE TABLE eval_groups (
    eval_group_id  INTEGER PRIMARY KEY,
    policy_version INTEGER NOT NULL,
    draw_id        INTEGER NOT NULL,
    segment        INTEGER NOT NULL,
    offset         INTEGER NOT NULL,
    length         INTEGER NOT NULL,
    sha256         BLOB NOT NULL CHECK (length(sha256) = 32)
) STRICT;
CREATE UNIQUE INDEX eval_groups_by_place ON eval_groups (segment, offset);
CREATE INDEX eval_groups_by_version ON eval_groups (policy_version, draw_id);

CREATE TABLE steps (
    step           INTEGER PRIMARY KEY,
    fingerprint    TEXT NOT NULL,
    batch_metrics  TEXT NOT NULL,
    begun_at_s     REAL NOT NULL,
    finished_at_s  REAL,
    weights_hash   TEXT,
    policy_version INTEGER,
    skipped        TEXT,
    metrics        TEXT,
    CHECK ((finished_at_s IS NULL) = (weights_hash IS NULL)),
    CHECK ((finished_at_s IS NULL) = (policy_version IS NULL)),
    CHECK ((finished_at_s IS NULL) = (metrics IS NULL)),
    CHECK (finished_at_s IS NOT NULL OR skipped IS NULL)
) STRICT;

CREATE TRIGGER step_in_order BEFORE INSERT ON steps
    WHEN NEW.step <> (SELECT COALESCE(MAX(step), 0) + 1 FROM steps)
      OR EXISTS (SELECT 1 FROM steps WHERE step = NEW.step - 1 AND finished_at_s IS NULL)
BEGIN SELECT RAISE(ABORT, 'steps count from 1 and begin when the one before is finished'); END;
CREATE TRIGGER step_finished_once BEFORE UPDATE ON steps
    WHEN OLD.finished_at_s IS NOT NULL OR NEW.fingerprint <> OLD.fingerprint
BEGIN SELECT RAISE(ABORT, 'a step is finished once and its batch never changes'); END;
CREATE TRIGGER step_kept BEFORE DELETE ON steps
BEGIN SELECT RAISE(ABORT, 'a step is never deleted'); END;

CREATE TABLE checkpoints (
    step       INTEGER PRIMARY KEY,
    folder     TEXT NOT NULL,
    state_hash TEXT NOT NULL
) STRICT;

CREATE TABLE evaluations (
    policy_version INTEGER PRIMARY KEY,
    report         TEXT NOT NULL,
    at_s           REAL NOT NULL
) STRICT;

CREATE TABLE events (
    event_id INTEGER PRIMARY KEY,
    kind     TEXT NOT NULL,
    payload  TEXT NOT NULL,
    at_s     REAL NOT NULL
) STRICT;
"""


def check_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Raise SchemaVersionError or RunDirectoryError unless this code reads the file."""
    (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application_id != APPLICATION_ID:
        raise RunDirectoryError(
            f"{path} is a database of another program; use another run directory"
        )
    if version == SCHEMA_VERSION:
        return
    writer = _written_by(connection)
    remedy = (
        f"go on with {writer}, or start a new run directory"
        if version < SCHEMA_VERSION
        else f"update posttrain to {writer} or later"
    )
    age = "an older" if version < SCHEMA_VERSION else "a newer"
    raise SchemaVersionError(
        f"{path} has schema version {version} of {age} posttrain; this code reads version "
        f"{SCHEMA_VERSION}: {remedy}"
    )


def _written_by(connection: sqlite3.Connection) -> str:
    try:
        row = connection.execute(
            "SELECT json_extract(value, '$.code_version') FROM meta WHERE key = 'header'"
        ).fetchone()
    except sqlite3.OperationalError:
        row = None  # another schema may keep its header elsewhere
    return f"posttrain {row[0]}" if row and row[0] else "the posttrain version that wrote it"

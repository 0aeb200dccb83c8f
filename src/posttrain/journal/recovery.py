"""What opening a journal to write repairs after a crash.

SQLite replays its own log. What is left are the segments: bytes behind the last referenced frame
belong to a commit that never happened and are cut off. After a power loss (not after the death of
a process) a row newer than the last barrier may refer to bytes that never reached the disk; the
log then ends before the first such frame, and the draws of that frame and of later ones are open
again without a group, to be generated from the same seeds.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from pathlib import Path
from typing import Any

from posttrain.journal.segments import (
    FOLDER_NAME,
    FrameKind,
    FrameRef,
    read_frame,
    segment_numbers,
    segment_path,
)
from posttrain.journal.storage import storage_errors, sync_folder

_PLACES = """
    SELECT segment, offset, length, sha256, {group}, draw_id, 0 FROM groups {where}
    UNION ALL
    SELECT segment, offset, length, sha256, {evaluation}, draw_id, policy_version
    FROM eval_groups {where}
    ORDER BY segment, offset
"""


def frame_refs(connection: sqlite3.Connection, segment: int = 0, offset: int = 0) -> list[FrameRef]:
    """Every frame the journal refers to, from a place on, in file order."""
    query = _PLACES.format(
        group=f"{FrameKind.TRAIN_GROUP:d}",
        evaluation=f"{FrameKind.EVAL_GROUP:d}",
        where="WHERE (segment, offset) >= (:segment, :offset)",
    )
    rows = connection.execute(query, {"segment": segment, "offset": offset}).fetchall()
    return [FrameRef(*row) for row in rows]


def read_barrier(connection: sqlite3.Connection) -> tuple[int, int]:
    """(segment, end) up to which the last barrier flushed the segments."""
    row = connection.execute("SELECT value FROM meta WHERE key = 'barrier'").fetchone()
    segment, end = json.loads(row[0]) if row else (1, 0)
    return segment, end


def write_barrier(connection: sqlite3.Connection, segment: int, end: int) -> None:
    """Record that the segments are on disk up to here; part of the barrier's transaction."""
    connection.execute(
        "INSERT OR REPLACE INTO meta VALUES ('barrier', ?)", (json.dumps([segment, end]),)
    )


def insert_event(connection: sqlite3.Connection, kind: str, payload_json: str) -> None:
    """Add an event with the present time, within the caller's transaction if there is one."""
    connection.execute(
        "INSERT INTO events (kind, payload, at_s) VALUES (?, ?, ?)",
        (kind, payload_json, time.time()),
    )


def recover_segments(run_dir: Path, connection: sqlite3.Connection) -> tuple[int, int]:
    """Repair the end of the log; (segment, end) where the next frame goes.

    Every repair that takes something away is recorded as an event. Raises StorageError.
    """
    barrier_segment, barrier_end = read_barrier(connection)
    unflushed = frame_refs(connection, barrier_segment, barrier_end)
    for index, ref in enumerate(unflushed):
        _, fault = read_frame(segment_path(run_dir, ref.segment), ref)
        if fault is not None:
            _forget_frames(connection, unflushed[index:], fault)
            break
    segment, end = _end_of_log(connection)
    _cut_tail(run_dir, connection, segment, end)
    _flush(run_dir, barrier_segment)
    path = segment_path(run_dir, segment)
    if end and (not path.exists() or path.stat().st_size < end):
        return segment + 1, 0  # damage before the barrier: leave it to `verify`, write elsewhere
    return segment, end


def _end_of_log(connection: sqlite3.Connection) -> tuple[int, int]:
    last = "SELECT segment, offset + length FROM {} ORDER BY segment DESC, offset DESC LIMIT 1"
    rows = [connection.execute(last.format(t)).fetchone() for t in ("groups", "eval_groups")]
    return max((row for row in rows if row), default=(1, 0))


def _forget_frames(connection: sqlite3.Connection, refs: list[FrameRef], fault: str) -> None:
    first = refs[0]
    payload: dict[str, Any] = {
        "segment": first.segment,
        "offset": first.offset,
        "fault": fault,
        "draw_ids": [r.draw_id for r in refs if r.kind == FrameKind.TRAIN_GROUP],
        "num_eval_groups": sum(r.kind == FrameKind.EVAL_GROUP for r in refs),
    }
    connection.execute("BEGIN IMMEDIATE")
    for table in ("groups", "eval_groups"):
        connection.execute(
            f"DELETE FROM {table} WHERE (segment, offset) >= (?, ?)",
            (first.segment, first.offset),
        )
    insert_event(connection, "groups_lost", json.dumps(payload))
    connection.execute("COMMIT")


def _cut_tail(run_dir: Path, connection: sqlite3.Connection, segment: int, end: int) -> None:
    for number in segment_numbers(run_dir):
        path = segment_path(run_dir, number)
        keep = end if number == segment else 0
        size = path.stat().st_size
        if number < segment or size < keep:
            continue
        if size > keep:
            payload = {"segment": number, "offset": keep, "num_bytes": size - keep}
            insert_event(connection, "tail_cut", json.dumps(payload))
        with storage_errors(path, f"cut back to {keep:,} bytes"):
            if keep:
                os.truncate(path, keep)
            else:
                path.unlink()


def _flush(run_dir: Path, first_segment: int) -> None:
    # The next barrier covers bytes that a dead process wrote and never flushed.
    for number in segment_numbers(run_dir):
        if number < first_segment:
            continue
        path = segment_path(run_dir, number)
        with storage_errors(path, "flush"):
            descriptor = os.open(path, os.O_WRONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    folder = run_dir / FOLDER_NAME
    with storage_errors(folder, "flush"):
        folder.mkdir(exist_ok=True)
        sync_folder(folder)

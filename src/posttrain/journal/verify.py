"""Is every byte of a journal what was written? Reads everything, repairs nothing."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from posttrain.errors import JournalError, RunDirectoryError, StorageError
from posttrain.journal.database import ReadConnection, database_path
from posttrain.journal.lock import writer_is_alive
from posttrain.journal.recovery import frame_refs
from posttrain.journal.segments import FrameKind, FrameRef, read_frame, segment_path
from posttrain.journal.segments import segment_numbers as numbers_on_disk
from posttrain.journal.storage import storage_errors


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: in which file, at which byte, of which draw if one is known.

    Example:
        >>> print(Problem("segments/00000001.seg", 120, 7, "the file ends here"))
        segments/00000001.seg: byte 120: draw 7: the file ends here
    """

    file: str
    offset: int
    draw_id: int | None
    fact: str

    def __str__(self) -> str:
        draw = "" if self.draw_id is None else f"draw {self.draw_id}: "
        return f"{self.file}: byte {self.offset}: {draw}{self.fact}"


def verify_segments(run_dir: Path) -> list[Problem]:
    """Every problem of the segments and of the database, in file order; empty when all is well.

    Every byte of every segment is read: each must lie in a frame that the database refers to and
    match its SHA-256. Works beside a live writer, whose frame in flight is no problem. Raises
    RunDirectoryError when there is no journal, StorageError when a file cannot be read.
    """
    run_dir = Path(run_dir)
    if not database_path(run_dir).exists():
        raise RunDirectoryError(f"{run_dir} holds no journal; check the path")
    # Sizes before rows: what a live writer commits in between is then referenced, not extra.
    sizes = {n: segment_path(run_dir, n).stat().st_size for n in numbers_on_disk(run_dir)}
    try:
        problems, refs = _database_problems(run_dir)
    except StorageError:
        raise
    except JournalError as damage:
        return [Problem(database_path(run_dir).name, 0, None, str(damage))]
    by_segment = {n: list(group) for n, group in groupby(refs, lambda ref: ref.segment)}
    last = max((*sizes, *by_segment), default=0)
    for number in sorted({*sizes, *by_segment}):
        spare_tail = number == last and writer_is_alive(run_dir)
        problems += _segment_problems(
            run_dir, number, by_segment.get(number, []), sizes.get(number, 0), spare_tail
        )
    return problems


def _database_problems(run_dir: Path) -> tuple[list[Problem], list[FrameRef]]:
    path = database_path(run_dir)
    with storage_errors(path, "verify the journal"):
        reader = ReadConnection(run_dir)
        try:
            connection = reader.get()
            connection.execute("BEGIN")  # one snapshot for all queries
            facts = [row[0] for row in connection.execute("PRAGMA integrity_check")]
            facts = [] if facts == ["ok"] else facts
            facts += _broken_rules(connection)
            return [Problem(path.name, 0, None, fact) for fact in facts], frame_refs(connection)
        finally:
            reader.close()


def _broken_rules(connection: sqlite3.Connection) -> list[str]:
    facts = [
        f"row {row[1]} of table {row[0]} refers to a missing row of {row[2]}"
        for row in connection.execute("PRAGMA foreign_key_check")
    ]
    facts += [
        f"draw {draw_id} was trained and has no recorded group"
        for (draw_id,) in connection.execute(
            "SELECT draw_id FROM draws LEFT JOIN groups USING (draw_id) "
            "WHERE status = 'trained' AND segment IS NULL"
        )
    ]
    return facts


def _segment_problems(
    run_dir: Path, number: int, refs: list[FrameRef], size: int, spare_tail: bool
) -> list[Problem]:
    path = segment_path(run_dir, number)
    file = path.relative_to(run_dir).as_posix()
    problems = []
    end = 0
    for ref in refs:
        if ref.offset > end:
            fact = f"{ref.offset - end} bytes that no record refers to"
            problems.append(Problem(file, end, None, fact))
        elif ref.offset < end:
            fact = f"the frame overlaps the one before, which ends at byte {end}"
            problems.append(Problem(file, ref.offset, _draw_of(ref), fact))
        _, fault = read_frame(path, ref)
        if fault is not None:
            problems.append(Problem(file, ref.offset, _draw_of(ref), fault))
        end = ref.end
    if size > end and not spare_tail:
        problems.append(Problem(file, end, None, f"{size - end} bytes that no record refers to"))
    return problems


def _draw_of(ref: FrameRef) -> int | None:
    return ref.draw_id if ref.kind == FrameKind.TRAIN_GROUP else None

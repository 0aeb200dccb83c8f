"""The rules of the log, with messages for people. `schema.py` holds the same ones for SQLite."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

from posttrain.errors import JournalError, ReplayMismatchError
from posttrain.journal.records import DrawStatus, StepRecord
from posttrain.types import Draw, TrainBatch

_HAS_GROUP = "EXISTS (SELECT 1 FROM groups WHERE groups.draw_id = draws.draw_id)"


def check_open(connection: sqlite3.Connection, path: Path, draw_id: int, purpose: str) -> None:
    """Raise JournalError unless the draw is recorded and open. `purpose` completes "cannot"."""
    row = connection.execute(
        "SELECT status, step, reason FROM draws WHERE draw_id = ?", (int(draw_id),)
    ).fetchone()
    if row is None:
        raise JournalError(
            f"{path}: draw {draw_id} was never recorded and cannot {purpose}; "
            "call record_draw first"
        )
    status, step, reason = row
    if status != DrawStatus.OPEN:
        fate = f"{status} at step {step}" if step is not None else status
        because = f" ({reason})" if reason is not None else ""
        raise JournalError(
            f"{path}: draw {draw_id} was {fate}{because} and cannot {purpose}; "
            "take draws from open_draws()"
        )


def check_group_is_new(connection: sqlite3.Connection, path: Path, draw: Draw) -> None:
    """Raise JournalError unless the draw is open, as recorded, and has no group."""
    row = connection.execute(
        f"SELECT task_id, epoch, seed, environment, {_HAS_GROUP} FROM draws "
        "WHERE draw_id = ? AND status = 'open'",
        (int(draw.draw_id),),
    ).fetchone()
    if row is None:
        check_open(connection, path, draw.draw_id, "get a group")
    assert row is not None, "what is not open was refused"
    if row[4]:
        raise JournalError(
            f"{path}: the group of draw {draw.draw_id} is recorded already; read it with group()"
        )
    if row[:4] != (draw.task_id, draw.epoch, draw.seed, draw.environment):
        raise JournalError(
            f"{path}: draw {draw.draw_id} was recorded as {Draw(draw.draw_id, *row[:4])} "
            f"and its group says {draw}; a group carries the draw it was generated from"
        )


def check_next_step(connection: sqlite3.Connection, path: Path, step: int) -> None:
    """Raise JournalError unless `step` is the next one and the one before is finished."""
    row = connection.execute(
        "SELECT step, finished_at_s FROM steps ORDER BY step DESC LIMIT 1"
    ).fetchone()
    last, finished_at_s = row or (0, 0.0)
    if finished_at_s is None:
        raise JournalError(
            f"{path}: step {step} cannot begin while step {last} is unfinished; "
            f"redo step {last} first"
        )
    if step != last + 1:
        raise JournalError(
            f"{path}: step {step} cannot follow step {last}; steps count from 1 without a gap, "
            f"the next is {last + 1}"
        )


def check_batch(batch: TrainBatch) -> None:
    """Raise JournalError when the batch contradicts itself about its draws."""
    draw_ids = set(batch.draw_ids)
    if len(draw_ids) != len(batch.draw_ids):
        raise JournalError(f"step {batch.step} takes a draw twice: {batch.draw_ids}; take it once")
    if strangers := set(batch.dropped) - draw_ids:
        raise JournalError(
            f"step {batch.step} drops draws {sorted(strangers)} that it did not take; use drop_draw"
        )
    trained = draw_ids - set(batch.dropped)
    if strangers := {s.draw_id for s in batch.samples} - trained:
        raise JournalError(
            f"step {batch.step} has samples of draws {sorted(strangers)} that it dropped or did "
            "not take; build the batch from the draws it lists"
        )


def consumed_rows(
    connection: sqlite3.Connection, path: Path, batch: TrainBatch
) -> list[tuple[str, int, int, str | None, int]]:
    """(status, step, position, reason, draw_id) of every draw that the step closes.

    Raises JournalError when a draw is not open, or is to be trained and has no group.
    """
    draw_ids = [int(draw_id) for draw_id in batch.draw_ids]
    has_group = dict(
        connection.execute(
            f"SELECT draw_id, {_HAS_GROUP} FROM draws WHERE status = 'open' "
            "AND draw_id IN (SELECT value FROM json_each(?))",
            (json.dumps(draw_ids),),
        )
    )
    rows = []
    for position, draw_id in enumerate(draw_ids):
        reason = batch.dropped.get(draw_id)
        purpose = f"be {'trained' if reason is None else 'dropped'} at step {batch.step}"
        if draw_id not in has_group:
            check_open(connection, path, draw_id, purpose)
        if reason is None:
            if not has_group[draw_id]:
                raise JournalError(
                    f"{path}: draw {draw_id} has no recorded group and cannot {purpose}; "
                    "call record_group first"
                )
            rows.append((DrawStatus.TRAINED.value, int(batch.step), position, None, draw_id))
        else:
            reason = reason_text(f"draw {draw_id}", reason)
            rows.append((DrawStatus.DROPPED.value, int(batch.step), position, reason, draw_id))
    return rows


def check_redo(path: Path, recorded: StepRecord, batch: TrainBatch, fingerprint: str) -> None:
    """Raise JournalError unless the batch is the one that the step was begun with."""
    differences = [
        f"{name} {asked!r}, recorded {held!r}"
        for name, asked, held in (
            ("draws", tuple(batch.draw_ids), recorded.draw_ids),
            ("dropped", dict(batch.dropped), recorded.dropped),
            ("fingerprint", fingerprint, recorded.fingerprint),
        )
        if asked != held
    ]
    if differences:
        raise JournalError(
            f"{path}: step {batch.step} is in the journal with another batch: "
            f"{'; '.join(differences)}; redo it from its recorded draws, in order, with the "
            "recipe of the run"
        )


def check_same_weights(step: int, recorded: str, redone: str) -> None:
    """Raise ReplayMismatchError unless a redo gave the recorded weights."""
    if recorded != redone:
        raise ReplayMismatchError(
            f"step {step} was recorded with weights {recorded} and its redo gave {redone}; "
            "redo it with the recorded package versions, thread count and device "
            "(see the run header)"
        )


def int64(what: str, value: int) -> int:
    """A plain int that SQLite keeps exactly, or JournalError."""
    number = int(value)
    if not -(2**63) <= number < 2**63:
        raise JournalError(f"{what} is {number}; the journal keeps 64-bit integers")
    return number


def exact_text(what: str, value: str) -> str:
    """Text that SQLite gives back unchanged, or JournalError."""
    text = str(value)
    try:
        text.encode()
    except UnicodeEncodeError as cause:
        raise JournalError(f"{what} is {text!r}, which is not valid Unicode: {cause}") from cause
    return text


def reason_text(what: str, value: str) -> str:
    """A reason to count by. It may quote model output, so lone surrogates are escaped."""
    if not value:
        raise JournalError(f"{what}: the reason is empty; say why, the ledger counts by it")
    return value.encode("utf-8", "backslashreplace").decode()

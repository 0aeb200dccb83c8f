"""Everything a journal answers. Reading never writes; `Journal` adds the writing."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.errors import JournalCorruptError, JournalError
from posttrain.journal.codec import decode_group
from posttrain.journal.database import ReadConnection, database_path
from posttrain.journal.records import (
    CheckpointRecord,
    DrawRecord,
    DrawStatus,
    EvaluationRecord,
    EventRecord,
    GroupSummary,
    Ledger,
    RunHeader,
    StepRecord,
)
from posttrain.journal.segments import FrameKind, FrameRef, read_payload, segment_path
from posttrain.journal.storage import storage_errors
from posttrain.types import Draw, Group

_MAX_INT64 = 2**63 - 1
_SUMMARY_COLUMNS = (
    "num_trajectories, num_valid, num_sampled_tokens, min_policy_version, max_policy_version, "
    "reward_mean"
)


class JournalReader:
    """The reading half of `Journal`.

    Every method may raise JournalError (closed journal), JournalCorruptError and StorageError.
    Draws and groups are training ones unless a name says `eval`.
    """

    def __init__(self, run_dir: Path, connection: sqlite3.Connection | ReadConnection) -> None:
        self.run_dir = run_dir
        self.path = database_path(run_dir)
        self._connection: sqlite3.Connection | ReadConnection | None = connection
        self._header: RunHeader | None = None

    @property
    def header(self) -> RunHeader:
        """What the run was started with."""
        if self._header is None:
            ((text,),) = self._rows("SELECT value FROM meta WHERE key = 'header'")
            self._header = RunHeader(**json.loads(text))
        return self._header

    def draw_status(self, draw_id: int) -> DrawStatus:
        """Open, trained or dropped. Raises JournalError for a draw that was never recorded."""
        return self.draw(draw_id).status

    def draw(self, draw_id: int) -> DrawRecord:
        """A draw and what became of it. Raises JournalError when it was never recorded."""
        records = self.draws(first=draw_id, limit=1)
        if not records or records[0].draw.draw_id != draw_id:
            raise JournalError(
                f"{self.path}: draw {draw_id} was never recorded; call record_draw first"
            )
        return records[0]

    def draws(self, first: int = 0, limit: int | None = None) -> list[DrawRecord]:
        """Draws in order from draw `first`, at most `limit` of them."""
        rows = self._rows(
            "SELECT draws.draw_id, task_id, epoch, seed, environment, status, step, reason, "
            f"{_SUMMARY_COLUMNS} FROM draws LEFT JOIN groups USING (draw_id) "
            "WHERE draws.draw_id >= ? ORDER BY draws.draw_id LIMIT ?",
            (int(first), -1 if limit is None else int(limit)),
        )
        return [
            DrawRecord(
                Draw(*row[:5]),
                DrawStatus(row[5]),
                row[6],
                row[7],
                GroupSummary(*row[8:]) if row[8] is not None else None,
            )
            for row in rows
        ]

    def next_draw_id(self) -> int:
        """One more than the largest recorded, 0 at first."""
        return self._rows("SELECT COALESCE(MAX(draw_id) + 1, 0) FROM draws")[0][0]

    def open_draws(self) -> list[tuple[Draw, bool]]:
        """Draws neither trained nor dropped, in order, and whether their group is recorded."""
        rows = self._rows(
            "SELECT draw_id, task_id, epoch, seed, environment, "
            "EXISTS (SELECT 1 FROM groups WHERE groups.draw_id = draws.draw_id) "
            "FROM draws WHERE status = 'open' ORDER BY draw_id"
        )
        return [(Draw(*row[:5]), bool(row[5])) for row in rows]

    def group(self, draw_id: int) -> Group:
        """The recorded group of a draw, checked against its checksum.

        Raises JournalError when none was recorded, and JournalCorruptError that names segment
        file, byte offset and draw.
        """
        refs = self._train_refs("WHERE draw_id = ?", (int(draw_id),))
        if not refs:
            status = self.draw_status(draw_id)
            raise JournalError(
                f"{self.path}: draw {draw_id} is {status} and has no recorded group; "
                "generate it from the draw"
            )
        return self._read_group(refs[0])

    def eval_groups(self, policy_version: int) -> Iterator[Group]:
        """Groups of the evaluation of one policy, by draw id; of a repeated draw the last."""
        latest = (
            "WHERE eval_group_id IN (SELECT MAX(eval_group_id) FROM eval_groups "
            "WHERE policy_version = ? GROUP BY draw_id) ORDER BY draw_id"
        )
        for ref in self._eval_refs(latest, (int(policy_version),)):
            yield self._read_group(ref)

    def steps(self, after: int = 0, limit: int | None = None) -> list[StepRecord]:
        """The `limit` steps that follow step `after`, in order; the last may be unfinished."""
        span = (int(after), _MAX_INT64 if limit is None else int(after) + int(limit))
        batches: dict[int, list[tuple[int, str | None]]] = {}
        for step, draw_id, reason in self._rows(
            "SELECT step, draw_id, reason FROM draws WHERE step > ? AND step <= ? "
            "ORDER BY step, position",
            span,
        ):
            batches.setdefault(step, []).append((draw_id, reason))
        rows = self._rows(
            "SELECT step, fingerprint, batch_metrics, finished_at_s, weights_hash, "
            "policy_version, skipped, metrics FROM steps WHERE step > ? AND step <= ? "
            "ORDER BY step",
            span,
        )
        return [_step_record(row, batches.get(row[0], [])) for row in rows]

    def last_finished_step(self) -> int:
        """0 before the first."""
        return self._rows(
            "SELECT COALESCE(MAX(step), 0) FROM steps WHERE finished_at_s IS NOT NULL"
        )[0][0]

    def checkpoints(self) -> list[CheckpointRecord]:
        """Checkpoints that were recorded and not forgotten, by step."""
        rows = self._rows("SELECT step, folder, state_hash FROM checkpoints ORDER BY step")
        return [CheckpointRecord(*row) for row in rows]

    def evaluations(self) -> list[EvaluationRecord]:
        """Evaluations by policy version."""
        rows = self._rows("SELECT policy_version, report FROM evaluations ORDER BY policy_version")
        return [EvaluationRecord(version, _from_json(report)) for version, report in rows]

    def events(self, kind: str | None = None) -> list[EventRecord]:
        """Events in the order they were recorded, of one kind or of all."""
        rows = self._rows(
            "SELECT event_id, kind, payload, at_s FROM events "
            "WHERE ?1 IS NULL OR kind = ?1 ORDER BY event_id",
            (kind,),
        )
        return [EventRecord(i, k, _from_json(payload), at_s) for i, k, payload, at_s in rows]

    def ledger(self) -> Ledger:
        """Where every draw went, counted by one query over one table."""
        drawn, by_status, dropped = 0, dict.fromkeys(DrawStatus, 0), {}
        for status, reason, count in self._rows(
            "SELECT status, reason, COUNT(*) FROM draws GROUP BY status, reason ORDER BY reason"
        ):
            drawn += count
            if status == DrawStatus.DROPPED:
                dropped[reason] = count
            else:
                by_status[DrawStatus(status)] += count
        return Ledger(
            drawn,
            by_status[DrawStatus.TRAINED],
            dropped,
            by_status[DrawStatus.OPEN],
        )

    def _db(self) -> sqlite3.Connection:
        if self._connection is None:
            raise JournalError(f"{self.path}: the journal is closed; open it again")
        if isinstance(self._connection, ReadConnection):
            return self._connection.get()
        return self._connection

    def _rows(self, query: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        with storage_errors(self.path, "read the journal"):
            return self._db().execute(query, values).fetchall()

    def _train_refs(self, where: str, values: tuple[Any, ...]) -> list[FrameRef]:
        query = (
            f"SELECT segment, offset, length, sha256, {FrameKind.TRAIN_GROUP:d}, draw_id, 0 "
            f"FROM groups {where}"
        )
        return [FrameRef(*row) for row in self._rows(query, values)]

    def _eval_refs(self, where: str, values: tuple[Any, ...]) -> list[FrameRef]:
        query = (
            f"SELECT segment, offset, length, sha256, {FrameKind.EVAL_GROUP:d}, draw_id, "
            f"policy_version FROM eval_groups {where}"
        )
        return [FrameRef(*row) for row in self._rows(query, values)]

    def _read_group(self, ref: FrameRef) -> Group:
        payload = read_payload(self.run_dir, ref)
        try:
            return decode_group(payload)
        except JournalCorruptError as cause:
            raise JournalCorruptError(
                f"{segment_path(self.run_dir, ref.segment)}: byte {ref.offset}: "
                f"group of draw {ref.draw_id}: {cause}"
            ) from cause


def _step_record(row: tuple[Any, ...], batch: list[tuple[int, str | None]]) -> StepRecord:
    step, fingerprint, batch_metrics, finished_at_s, weights_hash, version, skipped, metrics = row
    return StepRecord(
        step=step,
        draw_ids=tuple(draw_id for draw_id, _ in batch),
        dropped={d: reason for d, reason in batch if reason is not None},
        fingerprint=fingerprint,
        batch_metrics=_from_json(batch_metrics),
        finished=finished_at_s is not None,
        weights_hash=weights_hash,
        policy_version=version,
        skipped=skipped,
        metrics=_from_json(metrics or "{}"),
    )


def _from_json(text: str) -> Mapping[str, Any]:
    try:
        return json.loads(text)
    except ValueError as error:
        raise JournalCorruptError(
            f"journal.sqlite: a row holds {text[:40]!r}, which is no JSON ({error}); restore the "
            "file from a copy"
        ) from error

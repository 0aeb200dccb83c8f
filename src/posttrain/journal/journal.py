"""The journal of a run: a write-ahead log that neither loses nor repeats a draw.

What is guaranteed, exactly:

- Death of the process (SIGKILL, crash, out of memory) at any instruction loses nothing that a
  method returned from, and leaves nothing half done: each method is one SQLite transaction, and
  the frame it refers to is in the segment file before the commit.
- Loss of power or of the operating system: everything up to the last *barrier* is on disk.
  Barriers are begin_step, finish_step, record_checkpoint, forget_checkpoint, record_evaluation and
  close: each flushes the segment and then commits with a flushed log. Later draws and groups may
  be lost; such a draw is open without a group or not recorded at all, and is generated again from
  the same seed. A group that a step took is always on disk before the step.
- A disk that is full or broken raises StorageError. Nothing recorded is touched. When SQLite
  itself could not commit, the journal refuses further writes, because only opening it again tells
  whether that commit happened.

Use a journal from the thread that opened it. Readers in other processes need no lock.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from posttrain.errors import JournalError, RunDirectoryError, StorageError
from posttrain.journal.codec import encode_group
from posttrain.journal.database import (
    ReadConnection,
    create_database,
    database_path,
    open_to_write,
    set_durable,
    to_json,
    wal_path,
)
from posttrain.journal.invariants import (
    check_batch,
    check_group_is_new,
    check_next_step,
    check_open,
    check_redo,
    check_same_weights,
    consumed_rows,
    exact_text,
    int64,
    reason_text,
)
from posttrain.journal.lock import WriterLock
from posttrain.journal.reader import JournalReader
from posttrain.journal.records import GroupSummary, RunHeader
from posttrain.journal.recovery import insert_event, recover_segments, write_barrier
from posttrain.journal.segments import (
    DEFAULT_SEGMENT_BYTES,
    FOLDER_NAME,
    FrameKind,
    FrameRef,
    SegmentWriter,
    segment_numbers,
)
from posttrain.journal.storage import storage_errors
from posttrain.types import Draw, Group, StepResult, TrainBatch


class Journal(JournalReader):
    """One run's journal, opened to write or to read. Satisfies `protocols.DrawJournal`.

    Every writing method may raise StorageError, and JournalError when the journal is closed or
    read-only or when the call would break an invariant; nothing is written then.

    Example:
        >>> import tempfile
        >>> header = RunHeader({}, "0.1.0", {}, seed=0, threads=1, created_at="2026-01-01")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with Journal.create(Path(folder), header) as journal:
        ...         journal.record_draw(Draw(0, "add-1", epoch=0, seed=7))
        ...         journal.drop_draw(0, "stale")
        ...         journal.ledger()
        Ledger(drawn=1, trained=0, dropped={'stale': 1}, open=0)
    """

    def __init__(
        self,
        run_dir: Path,
        connection: sqlite3.Connection | ReadConnection,
        lock: WriterLock | None = None,
        segments: SegmentWriter | None = None,
    ) -> None:
        """Use `create` or `open`."""
        super().__init__(run_dir, connection)
        self._lock = lock
        self._segments = segments
        self._refusal: str | None = None
        self._durable: bool | None = None

    @classmethod
    def create(
        cls,
        run_dir: Path,
        header: RunHeader,
        max_segment_bytes: int = DEFAULT_SEGMENT_BYTES,
    ) -> Self:
        """Start the journal of a new run; all of it or, when killed, none.

        Raises RunDirectoryError when the folder holds a journal or its remains or is being
        written, StorageError when it cannot be written.
        """
        run_dir = Path(run_dir)
        header_json = to_json("run header", asdict(header))
        if run_dir.exists() and not run_dir.is_dir():
            raise RunDirectoryError(f"{run_dir} is a file; choose a folder as run directory")
        with storage_errors(run_dir, "create the run directory"):
            run_dir.mkdir(parents=True, exist_ok=True)
        lock = WriterLock(run_dir)
        try:
            _refuse_used(run_dir)
            with storage_errors(run_dir / FOLDER_NAME, "create the folder"):
                (run_dir / FOLDER_NAME).mkdir(exist_ok=True)
            create_database(run_dir, header_json)
            return cls._open_to_write(run_dir, lock, max_segment_bytes)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def open(
        cls,
        run_dir: Path,
        readonly: bool = False,
        max_segment_bytes: int = DEFAULT_SEGMENT_BYTES,
    ) -> Self:
        """Go on with a journal after a finished, stopped or killed run, or only read it.

        To write it repairs the end of the log (see `recovery`) and locks the run directory; to
        read it writes nothing and needs no lock. Raises RunDirectoryError when there is no
        journal or another writer, SchemaVersionError when another version wrote it.
        """
        run_dir = Path(run_dir)
        if not database_path(run_dir).exists():
            raise RunDirectoryError(
                f"{run_dir} holds no journal; check the path, or start the run without --resume"
            )
        if readonly:
            return cls(run_dir, ReadConnection(run_dir))
        lock = WriterLock(run_dir)
        try:
            return cls._open_to_write(run_dir, lock, max_segment_bytes)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def _open_to_write(cls, run_dir: Path, lock: WriterLock, max_segment_bytes: int) -> Self:
        connection = open_to_write(run_dir)
        try:
            with storage_errors(database_path(run_dir), "repair the end of the log"):
                segment, end = recover_segments(run_dir, connection)
        except BaseException:
            connection.close()
            raise
        segments = SegmentWriter(run_dir, segment, end, max_segment_bytes)
        return cls(run_dir, connection, lock, segments)

    @property
    def readonly(self) -> bool:
        return self._segments is None

    def close(self) -> None:
        """Flush everything and let the next writer in. Safe to call twice."""
        if self._connection is None:
            return
        try:
            if self._segments is not None and self._refusal is None:
                with self._transaction("flush the journal", barrier=True):
                    pass
        finally:
            connection, self._connection = self._connection, None
            if self._segments is not None:
                self._segments.close()
            connection.close()
            if self._lock is not None:
                self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def record_draw(self, draw: Draw) -> None:
        """A task was taken from the curriculum. Once for each draw id."""
        what = f"draw {draw.draw_id}"
        row = (
            int64(f"{what}: draw_id", draw.draw_id),
            exact_text(f"{what}: task_id", draw.task_id),
            int64(f"{what}: epoch", draw.epoch),
            int64(f"{what}: seed", draw.seed),
            exact_text(f"{what}: environment", draw.environment),
        )
        if row[0] < 0:
            raise JournalError(f"{what} is negative; draws count from 0")
        with self._transaction(f"record {what}") as connection:
            try:
                connection.execute(
                    "INSERT INTO draws (draw_id, task_id, epoch, seed, environment) "
                    "VALUES (?, ?, ?, ?, ?)",
                    row,
                )
            except sqlite3.IntegrityError as cause:
                raise JournalError(
                    f"{self.path}: {what} is recorded already; "
                    f"the next free draw id is {self.next_draw_id()}"
                ) from cause

    def record_group(self, group: Group) -> None:
        """All trajectories of an open draw are finished and judged. Once for each draw."""
        draw = group.draw
        draw_id = int64("group: draw_id", draw.draw_id)
        payload = encode_group(group)
        summary = GroupSummary.of(group)
        with self._transaction(f"record the group of draw {draw_id}") as connection:
            check_group_is_new(connection, self.path, draw)
            ref = self._append(FrameKind.TRAIN_GROUP, draw_id, 0, payload)
            connection.execute(
                "INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    draw_id,
                    ref.segment,
                    ref.offset,
                    ref.length,
                    ref.sha256,
                    summary.num_trajectories,
                    summary.num_valid,
                    summary.num_sampled_tokens,
                    summary.min_policy_version,
                    summary.max_policy_version,
                    summary.reward_mean,
                ),
            )

    def drop_draw(self, draw_id: int, reason: str) -> None:
        """An open draw will never be trained, for a reason that the ledger counts by."""
        reason = reason_text(f"draw {draw_id}", reason)
        with self._transaction(f"drop draw {draw_id}") as connection:
            check_open(connection, self.path, draw_id, "be dropped")
            connection.execute(
                "UPDATE draws SET status = 'dropped', reason = ? WHERE draw_id = ?",
                (reason, int(draw_id)),
            )

    def begin_step(self, batch: TrainBatch, fingerprint: str) -> None:
        """Commit, durably, to train exactly this batch; its draws are closed by this.

        `fingerprint` is the hash of the batch as built. Called again for a step that is in the
        journal, it accepts the same draws, drops and fingerprint as the redo of that step, and
        raises JournalError for any other.
        """
        fingerprint = exact_text(f"step {batch.step}: fingerprint", fingerprint)
        self._writable()
        if recorded := self.steps(after=batch.step - 1, limit=1):
            check_redo(self.path, recorded[0], batch, fingerprint)
            return
        check_batch(batch)
        metrics = to_json(f"step {batch.step}: batch metrics", dict(batch.metrics))
        with self._transaction(f"begin step {batch.step}", barrier=True) as connection:
            check_next_step(connection, self.path, batch.step)
            rows = consumed_rows(connection, self.path, batch)
            connection.execute(
                "INSERT INTO steps (step, fingerprint, batch_metrics, begun_at_s) "
                "VALUES (?, ?, ?, ?)",
                (int(batch.step), fingerprint, metrics, time.time()),
            )
            connection.executemany(
                "UPDATE draws SET status = ?, step = ?, position = ?, reason = ? WHERE draw_id = ?",
                rows,
            )

    def finish_step(self, result: StepResult) -> None:
        """The optimizer step is done and gave these weights. Durable.

        For a step that was finished before, the same `weights_hash` is accepted (a redo) and
        another raises ReplayMismatchError.
        """
        step = int(result.step)
        metrics = to_json(f"step {step}: metrics", dict(result.metrics))
        skipped = None if result.skipped is None else reason_text(f"step {step}", result.skipped)
        with self._transaction(f"finish step {step}", barrier=True) as connection:
            row = connection.execute(
                "SELECT weights_hash FROM steps WHERE step = ?", (step,)
            ).fetchone()
            if row is None:
                raise JournalError(f"{self.path}: step {step} was never begun; call begin_step")
            if row[0] is not None:
                check_same_weights(step, row[0], result.weights_hash)
                return
            connection.execute(
                "UPDATE steps SET finished_at_s = ?, weights_hash = ?, policy_version = ?, "
                "skipped = ?, metrics = ? WHERE step = ?",
                (
                    time.time(),
                    exact_text(f"step {step}: weights_hash", result.weights_hash),
                    int64(f"step {step}: policy_version", result.policy_version),
                    skipped,
                    metrics,
                    step,
                ),
            )

    def record_checkpoint(self, step: int, folder: str, state_hash: str) -> None:
        """The state after `step` (0: before the first) is complete in `folder`. Durable.

        A second checkpoint of the same step replaces the first.
        """
        if step > self.last_finished_step() or step < 0:
            raise JournalError(
                f"{self.path}: checkpoint of step {step}, but the last finished step is "
                f"{self.last_finished_step()}; finish the step first"
            )
        row = (
            int(step),
            exact_text("checkpoint: folder", folder),
            exact_text("checkpoint: state_hash", state_hash),
        )
        with self._transaction(f"record the checkpoint of step {step}", barrier=True) as c:
            c.execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?)", row)

    def forget_checkpoint(self, step: int) -> None:
        """The checkpoint must not be restored any more; call before deleting its folder."""
        with self._transaction(f"forget the checkpoint of step {step}", barrier=True) as c:
            if c.execute("DELETE FROM checkpoints WHERE step = ?", (int(step),)).rowcount == 0:
                raise JournalError(
                    f"{self.path}: no checkpoint of step {step} is recorded; see checkpoints()"
                )

    def record_eval_group(self, policy_version: int, group: Group) -> None:
        """Trajectories of an evaluation. A repeated draw replaces the earlier one for readers."""
        draw_id = int64("evaluation group: draw_id", group.draw.draw_id)
        version = int64("evaluation group: policy_version", policy_version)
        payload = encode_group(group)
        with self._transaction(f"record evaluation draw {draw_id}") as connection:
            ref = self._append(FrameKind.EVAL_GROUP, draw_id, version, payload)
            connection.execute(
                "INSERT INTO eval_groups (policy_version, draw_id, segment, offset, length, "
                "sha256) VALUES (?, ?, ?, ?, ?, ?)",
                (version, draw_id, ref.segment, ref.offset, ref.length, ref.sha256),
            )

    def record_evaluation(self, policy_version: int, report: Mapping[str, Any]) -> None:
        """The result of evaluating one policy; a second one of the same replaces it. Durable."""
        row = (int(policy_version), to_json("evaluation report", dict(report)), time.time())
        with self._transaction(f"record the evaluation of {policy_version}", barrier=True) as c:
            c.execute("INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?)", row)

    def record_event(self, kind: str, payload: Mapping[str, Any]) -> None:
        """An alarm, a restart, a count: anything that explains the run later."""
        text = to_json(f"event {kind}", dict(payload))
        with self._transaction(f"record the event {kind}") as connection:
            insert_event(connection, exact_text("event: kind", kind), text)

    @contextmanager
    def _transaction(self, action: str, barrier: bool = False) -> Iterator[sqlite3.Connection]:
        """One SQLite transaction and the frames appended in it: both or neither."""
        connection, segments = self._writable()
        place = (segments.segment, segments.end)
        committing = False
        try:
            with storage_errors(self.path, action):
                if barrier is not self._durable:
                    self._durable = None  # unknown while it changes
                    set_durable(connection, barrier)
                    self._durable = barrier
                connection.execute("BEGIN IMMEDIATE")
                yield connection
                committing = True
                if barrier:
                    segments.sync()
                    write_barrier(connection, segments.segment, segments.end)
                connection.execute("COMMIT")
        except BaseException as error:
            self._undo(connection, place, committing, error)
            raise

    def _undo(
        self,
        connection: sqlite3.Connection,
        place: tuple[int, int],
        committing: bool,
        error: BaseException,
    ) -> None:
        pending = connection.in_transaction
        if pending:
            with storage_errors(self.path, "roll back"):
                connection.execute("ROLLBACK")
        if isinstance(error, StorageError) and (committing or not pending):
            # Whether the commit reached the log is unknown: keep the frames, stop writing.
            self._refusal = str(error)
        elif pending and self._segments is not None:
            self._segments.cut(*place)

    def _writable(self) -> tuple[sqlite3.Connection, SegmentWriter]:
        if self._segments is None:
            raise JournalError(f"{self.path} is open read-only; open it without readonly to write")
        if self._refusal is not None:
            raise StorageError(
                f"{self.path} stopped taking records after this: {self._refusal}; "
                "open the journal again"
            )
        return self._db(), self._segments

    def _append(
        self, kind: FrameKind, draw_id: int, policy_version: int, payload: bytes
    ) -> FrameRef:
        return self._writable()[1].append(kind, draw_id, policy_version, payload)


def _refuse_used(run_dir: Path) -> None:
    if database_path(run_dir).exists():
        raise RunDirectoryError(
            f"{run_dir} holds a journal; go on with it with --resume or choose another folder"
        )
    if segment_numbers(run_dir) or wal_path(run_dir).exists():
        raise RunDirectoryError(
            f"{run_dir} holds the remains of a journal whose {database_path(run_dir).name} is "
            "gone; put that file back or choose another folder"
        )

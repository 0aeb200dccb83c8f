"""Forks writers of a journal, kills them with SIGKILL and checks what they left.

Usage: python kill_driver.py create|lines|anywhere FOLDER. Prints what happened; an assertion that
fails ends it with a traceback. A process of its own, because it forks.
"""

from __future__ import annotations

import hashlib
import os
import random
import runpy
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import posttrain.journal
from posttrain.journal import Journal, encode_group, verify_segments
from posttrain.types import TrainBatch

records = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("conftest.py"))))

SOURCE = str(Path(posttrain.journal.__file__).parent)
NUM_STEPS = 20
DRAWS_PER_STEP = 2
NUM_TASKS = 20
SEGMENT_BYTES = 4000
LEAD = 4


def die_at_line(countdown: int) -> None:
    """SIGKILL this process when it is about to run that many lines of the journal's code."""

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal countdown
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        if event == "line":
            countdown -= 1
            if countdown <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


def fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return pid


def was_killed(pid: int) -> bool:
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.waitstatus_to_exitcode(status) == 0
    return False


def planned_batch(step: int) -> TrainBatch:
    first = (step - 1) * DRAWS_PER_STEP
    return records.batch_of(step, tuple(range(first, first + DRAWS_PER_STEP)), {})


def weights_after(step: int) -> str:
    """What an uninterrupted run has: each step's weights follow from the last and its batch."""
    weights = "initial"
    for number in range(1, step + 1):
        batch = records.fingerprint_of(planned_batch(number))
        weights = hashlib.sha256((weights + batch).encode()).hexdigest()
    return weights


def train(run_dir: Path, report: Callable[[str], None]) -> None:
    """Start or resume a run of NUM_STEPS; `report` is told what the journal has returned from."""
    if (run_dir / "journal.sqlite").exists():
        journal = Journal.open(run_dir, max_segment_bytes=SEGMENT_BYTES)
    else:
        journal = Journal.create(run_dir, records.HEADER, max_segment_bytes=SEGMENT_BYTES)
    with journal:
        for step in range(journal.last_finished_step() + 1, NUM_STEPS + 1):
            batch = planned_batch(step)
            open_draws = {draw.draw_id: has_group for draw, has_group in journal.open_draws()}
            begun = bool(journal.steps(after=step - 1))
            for draw_id in () if begun else batch.draw_ids:
                draw = records.draw_of(draw_id, NUM_TASKS)
                if draw_id == journal.next_draw_id():
                    journal.record_draw(draw)
                    report(f"draw {draw_id}")
                if not open_draws.get(draw_id, False):
                    journal.record_group(records.group_of(draw))
                    report(f"group {draw_id}")
            journal.begin_step(batch, records.fingerprint_of(batch))
            report(f"begin {step}")
            journal.finish_step(records.result_of(step, weights_after(step)))
            report(f"finish {step}")


def check(run_dir: Path, reports: list[str], readonly: bool) -> None:
    """Nothing reported is missing, everything referenced reads back, and the tail is clean."""
    with Journal.open(run_dir, readonly=readonly, max_segment_bytes=SEGMENT_BYTES) as journal:
        assert journal.ledger().balanced
        statuses = {r.draw.draw_id: r for r in journal.draws()}
        assert sorted(statuses) == list(range(journal.next_draw_id()))
        for record in statuses.values():
            if record.group is not None:
                group = records.group_of(record.draw)
                assert encode_group(journal.group(record.draw.draw_id)) == encode_group(group)
        finished = {s.step for s in journal.steps() if s.finished}
        held = {f"draw {d}" for d in statuses}
        held |= {f"group {d}" for d, r in statuses.items() if r.group is not None}
        held |= {f"begin {s.step}" for s in journal.steps()} | {f"finish {s}" for s in finished}
        assert set(reports) <= held, sorted(set(reports) - held)
        for step in journal.steps():
            assert all(statuses[d].step == step.step for d in step.draw_ids)
        if not readonly:
            assert verify_segments(run_dir) == []


def check_finished(run_dir: Path) -> None:
    """Exactly what an uninterrupted run leaves: every task once for each epoch."""
    with Journal.open(run_dir, readonly=True) as journal:
        assert journal.last_finished_step() == NUM_STEPS
        assert journal.steps()[-1].weights_hash == weights_after(NUM_STEPS)
        trained = Counter(
            (record.draw.epoch, record.draw.task_id)
            for step in journal.steps()
            for record in map(journal.draw, step.trained)
        )
        num_epochs = NUM_STEPS * DRAWS_PER_STEP // NUM_TASKS
        assert trained == {(e, f"task-{t}"): 1 for e in range(num_epochs) for t in range(NUM_TASKS)}
    assert verify_segments(run_dir) == []


def kill_creators(folder: Path) -> None:
    """Kill `create` at every third line of it in turn, until one call gets through."""
    kills = 0
    while True:
        run_dir = folder / f"create-{kills}"

        def work(run_dir: Path = run_dir, countdown: int = 3 * kills + 1) -> None:
            die_at_line(countdown)
            Journal.create(run_dir, records.HEADER)
            sys.settrace(None)

        if not was_killed(fork(work)):
            break
        kills += 1
        if (run_dir / "journal.sqlite").exists():
            with Journal.open(run_dir) as journal:
                assert journal.header == records.HEADER
                assert journal.next_draw_id() == 0
        else:
            Journal.create(run_dir, records.HEADER).close()
        leftovers = {p.name for p in run_dir.iterdir()}
        assert leftovers == {"journal.lock", "journal.sqlite", "segments"}, leftovers
        assert verify_segments(run_dir) == []
    print(f"{kills} kills")


def kill_writers(folder: Path, at_line: bool) -> None:
    """Kill and resume one run until it is finished.

    Kills from outside come after 1 to 6 reports, while the writer, at most `LEAD` reports ahead,
    goes on working: they fall anywhere, and yet no round can finish the run at once.
    """
    run_dir = folder / "run"
    rng = random.Random(17)
    kills = 0
    killed = True
    while killed:
        report_pipe, go_pipe = os.pipe(), os.pipe()
        countdown, patience = rng.randrange(1, 1200), rng.randrange(1, 7)

        def work(
            report_end: int = report_pipe[1], go_end: int = go_pipe[0], countdown: int = countdown
        ) -> None:
            credit = sys.maxsize if at_line else LEAD

            def report(text: str) -> None:
                nonlocal credit
                os.write(report_end, f"{text}\n".encode())
                credit -= 1
                if credit < 0:
                    os.read(go_end, 1)

            if at_line:
                die_at_line(countdown)
            train(run_dir, report)
            sys.settrace(None)

        pid = fork(work)
        os.close(report_pipe[1])
        received = b""
        while chunk := os.read(report_pipe[0], 64):
            received += chunk
            if at_line:
                continue
            if received.count(b"\n") >= patience:
                os.kill(pid, signal.SIGKILL)
            else:
                os.write(go_pipe[1], b"x" * chunk.count(b"\n"))
        for descriptor in (report_pipe[0], *go_pipe):
            os.close(descriptor)
        killed = was_killed(pid)
        kills += killed
        if (run_dir / "journal.sqlite").exists():
            check(run_dir, received.decode().splitlines(), readonly=kills % 2 == 0)
    check_finished(run_dir)
    print(f"{kills} kills")


if __name__ == "__main__":
    mode, target = sys.argv[1], Path(sys.argv[2])
    if mode == "create":
        kill_creators(target)
    else:
        kill_writers(target, at_line=mode == "lines")

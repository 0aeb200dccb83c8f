"""Bytes that changed are found, and named by file, offset and draw; crash tails are cut."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from posttrain.errors import JournalCorruptError, JournalError
from posttrain.journal import DrawStatus, Journal, encode_group, verify_segments
from posttrain.journal.segments import FrameKind, SegmentWriter, build_frame
from posttrain.types import TrainBatch

FIRST = "segments/00000001.seg"


@pytest.fixture
def small(journal, run_dir, make_draw, make_group) -> Path:
    """A closed journal whose one segment holds draws 0 and 1 and an evaluation group."""
    for draw_id in range(2):
        journal.record_draw(make_draw(draw_id))
        journal.record_group(make_group(make_draw(draw_id), size=1 - draw_id))
    journal.record_eval_group(0, make_group(make_draw(0), size=0))
    journal.close()
    assert verify_segments(run_dir) == []
    return run_dir


def frame_starts(run_dir: Path) -> list[int]:
    connection = sqlite3.connect(run_dir / "journal.sqlite")
    try:
        rows = connection.execute(
            "SELECT offset FROM groups UNION ALL SELECT offset FROM eval_groups ORDER BY offset"
        )
        return [offset for (offset,) in rows]
    finally:
        connection.close()


def flip(path: Path, offset: int, mask: int = 0x01) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= mask
    path.write_bytes(data)


def execute(run_dir: Path, *statements: str) -> None:
    connection = sqlite3.connect(run_dir / "journal.sqlite")
    with connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


def test_a_flipped_bit_in_any_byte_is_reported_with_file_offset_and_draw(small) -> None:
    path = small / FIRST
    starts = frame_starts(small)
    draws = [0, 1, None]  # the third frame belongs to an evaluation
    original = path.read_bytes()
    for offset in range(len(original)):
        changed = bytearray(original)
        changed[offset] ^= 1 << offset % 8
        path.write_bytes(changed)
        index = max(i for i, start in enumerate(starts) if start <= offset)
        found = [(p.file, p.offset, p.draw_id) for p in verify_segments(small)]
        assert found == [(FIRST, starts[index], draws[index])], f"byte {offset}"
    path.write_bytes(original)
    assert verify_segments(small) == []


def test_reading_a_damaged_group_names_file_offset_and_draw(small, make_draw, make_group) -> None:
    start = frame_starts(small)[1]
    flip(small / FIRST, start + 100)
    with Journal.open(small) as journal:
        with pytest.raises(JournalCorruptError, match=rf"{FIRST}: byte {start}: .*draw 1 is dam"):
            journal.group(1)
        undamaged = make_group(make_draw(0), size=1)
        assert encode_group(journal.group(0)) == encode_group(undamaged)


def test_a_missing_segment_is_reported_for_each_of_its_draws(small) -> None:
    (small / FIRST).unlink()
    problems = verify_segments(small)
    assert [(p.offset, p.draw_id) for p in problems] == list(
        zip(frame_starts(small), [0, 1, None], strict=True)
    )
    assert all("missing" in p.fact for p in problems)
    with (
        Journal.open(small, readonly=True) as journal,
        pytest.raises(JournalCorruptError, match="the file is missing"),
    ):
        journal.group(0)


def test_a_shorter_segment_is_reported_where_it_breaks_off(small) -> None:
    path = small / FIRST
    path.write_bytes(path.read_bytes()[:-10])
    (problem,) = verify_segments(small)
    assert problem.offset == frame_starts(small)[2]
    assert "the file ends after" in problem.fact


def test_extra_bytes_are_reported_where_they_begin(small) -> None:
    path = small / FIRST
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"extra")
    (problem,) = verify_segments(small)
    assert (problem.offset, problem.fact) == (size, "5 bytes that no record refers to")


def test_a_whole_frame_of_another_draw_in_the_place_of_one_is_reported(small) -> None:
    path, (_, second, third) = small / FIRST, frame_starts(small)
    data = path.read_bytes()
    path.write_bytes(data[second:third] + data[second:])
    assert {p.draw_id for p in verify_segments(small)} >= {0, 1}


def test_a_frame_whose_record_is_gone_is_reported(small) -> None:
    execute(small, "DELETE FROM groups WHERE draw_id = 0")
    (problem,) = verify_segments(small)
    assert (problem.file, problem.offset) == (FIRST, 0)


def test_a_trained_draw_without_group_is_reported(journal, run_dir, make_steps) -> None:
    make_steps(journal, 1)
    journal.close()
    execute(run_dir, "DROP TRIGGER trained_group_kept", "DELETE FROM groups WHERE draw_id = 0")
    facts = [p.fact for p in verify_segments(run_dir)]
    assert "draw 0 was trained and has no recorded group" in facts


def test_a_damaged_database_is_reported_and_not_read(small) -> None:
    path = small / "journal.sqlite"
    page = 4096
    data = bytearray(path.read_bytes())
    data[page:-page] = bytes(len(data) - 2 * page)  # what a failing disk does to whole pages
    path.write_bytes(data)
    problems = verify_segments(small)
    assert problems
    assert {p.file for p in problems} == {"journal.sqlite"}
    with pytest.raises(JournalError), Journal.open(small) as journal:
        journal.ledger()


def test_segments_rotate_at_their_size(run_dir, header, make_steps, make_draw, make_group) -> None:
    with Journal.create(run_dir, header, max_segment_bytes=2500) as journal:
        make_steps(journal, 3)
    with Journal.open(run_dir, max_segment_bytes=2500) as journal:
        make_steps(journal, 3)
        for draw_id in range(12):
            expected = make_group(make_draw(draw_id))
            assert encode_group(journal.group(draw_id)) == encode_group(expected)
    sizes = [p.stat().st_size for p in sorted((run_dir / "segments").iterdir())]
    assert len(sizes) > 3
    assert max(sizes) <= 2500
    assert verify_segments(run_dir) == []


def test_a_group_larger_than_a_segment_gets_its_own(run_dir, header, make_steps) -> None:
    with Journal.create(run_dir, header, max_segment_bytes=10) as journal:
        make_steps(journal, 1)
        assert journal.group(1).draw.draw_id == 1
    assert len(list((run_dir / "segments").iterdir())) == 2
    assert verify_segments(run_dir) == []


def test_the_tail_of_a_commit_that_never_happened_is_cut(small, make_steps) -> None:
    path = small / FIRST
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"PTJ1 half a frame")
    (small / "segments" / "00000002.seg").write_bytes(b"a segment begun and not committed")
    with Journal.open(small) as journal:
        assert path.stat().st_size == size
        assert [
            (e.payload["segment"], e.payload["offset"]) for e in journal.events("tail_cut")
        ] == [
            (1, size),
            (2, 0),
        ]
        make_steps(journal, 1)
    assert verify_segments(small) == []


def test_a_refused_group_leaves_no_bytes_behind(journal, run_dir, make_draw, make_group) -> None:
    journal.record_draw(make_draw(0))
    journal.record_group(make_group(make_draw(0)))
    size = (run_dir / FIRST).stat().st_size
    with pytest.raises(JournalError):
        journal.record_group(make_group(make_draw(0)))
    assert (run_dir / FIRST).stat().st_size == size
    assert verify_segments(run_dir) == []


def test_bytes_that_a_power_loss_took_reopen_their_draws(
    journal, run_dir, make_steps, make_draw, make_group
) -> None:
    """After the last barrier the segment may lag behind the database; before it, never."""
    make_steps(journal, 2)
    durable = (run_dir / FIRST).stat().st_size
    for draw_id in range(4, 7):
        journal.record_draw(make_draw(draw_id))
        journal.record_group(make_group(make_draw(draw_id)))
    starts = frame_starts(run_dir)
    crash = run_dir.with_name("crash")
    for name in ("journal.sqlite", "journal.sqlite-wal", FIRST):
        target = crash / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((run_dir / name).read_bytes())
    flip(crash / FIRST, starts[5] + 70)  # the page of draw 5 never reached the disk
    with Journal.open(crash) as survivor:
        assert survivor.open_draws() == [
            (make_draw(4), True),
            (make_draw(5), False),
            (make_draw(6), False),
        ]
        (lost,) = survivor.events("groups_lost")
        assert (lost.payload["draw_ids"], lost.payload["offset"]) == ([5, 6], starts[5])
        assert starts[5] > durable
        survivor.record_group(make_group(make_draw(5)))
        assert verify_segments(crash) == []
        assert survivor.ledger().balanced


def test_damage_before_the_barrier_is_never_repaired_away(
    journal, run_dir, make_steps, make_draw, make_group
) -> None:
    make_steps(journal, 2)
    journal.close()
    path = run_dir / FIRST
    path.write_bytes(path.read_bytes()[:-5])
    with Journal.open(run_dir) as journal:
        assert journal.draw_status(2) == DrawStatus.TRAINED
        make_steps(journal, 1)
        with pytest.raises(JournalCorruptError, match="draw 3 is damaged: the file ends"):
            journal.group(3)
        assert encode_group(journal.group(4)) == encode_group(make_group(make_draw(4)))
    (problem,) = verify_segments(run_dir)
    assert (problem.file, problem.draw_id) == (FIRST, 3)


def test_a_barrier_covers_every_frame_written_before_it(
    run_dir, header, make_draw, make_group
) -> None:
    def covered() -> int:
        connection = sqlite3.connect(run_dir / "journal.sqlite")
        try:
            row = connection.execute("SELECT value FROM meta WHERE key = 'barrier'").fetchone()
        finally:
            connection.close()
        return json.loads(row[0])[1] if row else 0

    with Journal.create(run_dir, header) as journal:
        journal.record_draw(make_draw(0))
        journal.record_group(make_group(make_draw(0)))
        size = (run_dir / FIRST).stat().st_size
        assert covered() == 0
        journal.begin_step(TrainBatch(1, (), (0,)), "fingerprint")
        assert covered() == size


@pytest.mark.parametrize("max_segment_bytes", [10, 10_000])
def test_an_interrupt_between_frame_and_row_takes_both_back(
    run_dir, header, make_draw, make_group, monkeypatch, max_segment_bytes
) -> None:
    """In the same segment, and where the frame had begun a new one."""
    append = SegmentWriter.append

    def interrupted(*arguments: object) -> None:
        append(*arguments)
        raise KeyboardInterrupt

    with Journal.create(run_dir, header, max_segment_bytes=max_segment_bytes) as journal:
        for draw_id in range(2):
            journal.record_draw(make_draw(draw_id))
        journal.record_group(make_group(make_draw(0)))
        with monkeypatch.context() as patch:
            patch.setattr(SegmentWriter, "append", interrupted)
            with pytest.raises(KeyboardInterrupt):
                journal.record_group(make_group(make_draw(1), size=3))
        assert journal.open_draws() == [(make_draw(0), True), (make_draw(1), False)]
        journal.record_group(make_group(make_draw(1)))
        for draw_id in range(2):
            expected = make_group(make_draw(draw_id))
            assert encode_group(journal.group(draw_id)) == encode_group(expected)
    assert verify_segments(run_dir) == []


def test_a_valid_frame_with_other_content_is_reported(small, make_draw, make_group) -> None:
    """A segment restored from another run: same draw, same length, its own checksum right."""
    payload = encode_group(make_group(make_draw(0), size=1))
    forged = payload.replace(b"evidence", b"evidenze")
    head, _ = build_frame(FrameKind.TRAIN_GROUP, 0, 0, forged)
    path = small / FIRST
    data = path.read_bytes()
    path.write_bytes(head + forged + data[frame_starts(small)[1] :])
    (problem,) = verify_segments(small)
    assert (problem.offset, problem.draw_id) == (0, 0)
    assert "not the one the journal recorded" in problem.fact


def test_what_a_killed_writer_left_unflushed_is_flushed_on_opening(
    journal, run_dir, make_draw, make_group, monkeypatch
) -> None:
    """Else the next barrier would vouch for bytes that nobody ever sent to the disk."""
    journal.record_draw(make_draw(0))
    journal.record_group(make_group(make_draw(0)))
    killed = run_dir.with_name("killed")
    shutil.copytree(run_dir, killed)
    flushed: set[int] = set()
    fsync = os.fsync

    def recording_fsync(descriptor: int) -> None:
        flushed.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    with Journal.open(killed) as survivor:
        assert survivor.open_draws() == [(make_draw(0), True)]
        assert (killed / FIRST).stat().st_ino in flushed

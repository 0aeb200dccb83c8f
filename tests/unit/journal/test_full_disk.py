"""A disk that takes no more: a clear error at once, and nothing recorded is lost."""

from __future__ import annotations

import errno
import os
import resource
import runpy
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.errors import StorageError
from posttrain.journal import Journal, encode_group, verify_segments
from posttrain.journal.storage import sqlite_error

FILL = """
import runpy, sys
from pathlib import Path
from posttrain.errors import StorageError
from posttrain.journal import Journal, encode_group, verify_segments
records = runpy.run_path(sys.argv[2])
draw_of, group_of = records["draw_of"], records["group_of"]
run_dir, acknowledged = Path(sys.argv[1]), -1
journal = Journal.create(run_dir, records["HEADER"])
records["run_steps"](journal, 1)
try:
    while True:
        draw = draw_of(journal.next_draw_id())
        journal.record_draw(draw)
        journal.record_group(group_of(draw, size=40))
        acknowledged = draw.draw_id
except StorageError as error:
    print(acknowledged, error)
try:
    journal.close()
except StorageError as error:
    print("close", error)
with Journal.open(run_dir, readonly=True) as reader:
    assert reader.last_finished_step() == 1
    for draw_id in range(2, acknowledged + 1):
        assert encode_group(reader.group(draw_id)) == encode_group(group_of(draw_of(draw_id), 40))
"""


def check_refusal(done: subprocess.CompletedProcess[str], run_dir: Path, fact: str) -> int:
    assert done.returncode == 0, done.stderr
    acknowledged, _, message = done.stdout.splitlines()[0].partition(" ")
    assert int(acknowledged) > 2
    assert message.startswith(str(run_dir))
    for part in (fact, "bytes free", "--resume", "what was recorded before is kept"):
        assert part in message
    return int(acknowledged)


def records_path() -> Path:
    return Path(__file__).with_name("conftest.py")


def test_a_file_size_limit_stops_the_run_with_its_remedy_and_loses_nothing(run_dir) -> None:
    """Field report f09: a full output disk, clear error with path and size, earlier work intact."""
    limit = 600_000

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    done = subprocess.run(
        [sys.executable, "-c", FILL, str(run_dir), str(records_path())],
        capture_output=True,
        text=True,
        preexec_fn=limited,
    )
    acknowledged = check_refusal(done, run_dir, "ulimit -f")
    with Journal.open(run_dir) as journal:  # with the limit gone the run goes on
        runpy.run_path(str(records_path()))["run_steps"](journal, 1)
        assert journal.ledger().balanced
        assert journal.group(acknowledged).draw.draw_id == acknowledged
    assert verify_segments(run_dir) == []


def test_a_full_file_system_stops_the_run_with_its_remedy_and_loses_nothing(tmp_path) -> None:
    """Field report f09 on a real full disk: a tmpfs of two megabytes."""
    unshare = [shutil.which("unshare") or "unshare", "--user", "--map-root-user", "--mount"]
    script = 'mount -t tmpfs -o size=2m tmpfs "$1"; exec "$2" -c "$3" "$1/run" "$4"'
    arguments = ["sh", str(tmp_path), sys.executable, FILL, str(records_path())]
    probe = ["sh", "-ec", 'mount -t tmpfs -o size=2m tmpfs "$1"', "sh", str(tmp_path)]
    try:
        subprocess.run([*unshare, *probe], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this system lets nobody mount in a namespace of their own")
    done = subprocess.run(
        [*unshare, "sh", "-ec", script, *arguments], capture_output=True, text=True
    )
    check_refusal(done, tmp_path / "run", "")


def test_a_refused_frame_leaves_the_journal_usable(
    journal, run_dir, make_draw, make_group, monkeypatch
) -> None:
    """The disk is full for one write only: the draw stays open and is recorded later."""
    journal.record_draw(make_draw(0))
    write = os.pwritev

    def refuse(descriptor: int, buffers: tuple[bytes, ...], offset: int) -> int:
        write(descriptor, (buffers[0],), offset)  # half a frame reaches the file
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", refuse)
        with pytest.raises(StorageError, match=r"cannot write .* bytes at 0: No space") as caught:
            journal.record_group(make_group(make_draw(0)))
    assert caught.value.errno == errno.ENOSPC
    assert journal.open_draws() == [(make_draw(0), False)]
    assert (run_dir / "segments" / "00000001.seg").stat().st_size == 0
    journal.record_group(make_group(make_draw(0)))
    assert encode_group(journal.group(0)) == encode_group(make_group(make_draw(0)))
    assert verify_segments(run_dir) == []


def test_after_a_failed_flush_the_journal_takes_no_more_records(
    journal, run_dir, make_draw, make_group, make_steps, monkeypatch
) -> None:
    """A second fsync after a failed one may lie, so the journal must be opened again."""
    make_steps(journal, 1)
    journal.record_draw(make_draw(2))
    journal.record_group(make_group(make_draw(2)))

    def refuse(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(StorageError, match="cannot flush"):
            journal.record_evaluation(1, {"accuracy": 1.0})
    with pytest.raises(StorageError, match=r"stopped taking records after this: .*cannot flush"):
        journal.record_draw(make_draw(3))
    journal.close()
    with Journal.open(run_dir) as journal:
        assert journal.evaluations() == []
        assert journal.open_draws() == [(make_draw(2), True)]
        make_steps(journal, 1)
    assert verify_segments(run_dir) == []


@pytest.mark.parametrize(
    ("code", "number", "remedy"),
    [
        (sqlite3.SQLITE_FULL, errno.ENOSPC, "free some space"),
        (sqlite3.SQLITE_IOERR_WRITE, errno.EIO, "check the disk"),
        (sqlite3.SQLITE_READONLY, errno.EACCES, "write permission"),
    ],
)
def test_what_sqlite_cannot_store_is_a_storage_error(tmp_path, code, number, remedy) -> None:
    cause = sqlite3.OperationalError("refused")
    cause.sqlite_errorcode = code
    error = sqlite_error(tmp_path / "journal.sqlite", "record draw 1", cause)
    assert isinstance(error, StorageError)
    assert error.errno == number
    assert remedy in str(error)
    assert "cannot record draw 1" in str(error)

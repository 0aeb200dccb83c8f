"""Who may open a journal, and what each of them sees."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from posttrain.errors import JournalError, RunDirectoryError, SchemaVersionError, StorageError
from posttrain.journal import Journal, verify_segments
from posttrain.types import SCHEMA_VERSION

HOLD = """
    import os, signal, sys
    from pathlib import Path
    from posttrain.journal import Journal
    from posttrain.types import Draw
    journal = Journal.open(Path(sys.argv[1]))
    journal.record_draw(Draw(journal.next_draw_id(), "held", 0, 1))
"""


def python(code: str, *arguments: object, **options) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


def in_private_mounts(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a shell script whose mounts nobody else sees; skip where the system refuses."""
    unshare = [shutil.which("unshare") or "unshare", "--user", "--map-root-user", "--mount"]
    try:
        subprocess.run([*unshare, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this system lets nobody mount in a namespace of their own")
    command = [*unshare, "sh", "-ec", script, "sh", sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def files_of(run_dir: Path) -> dict[str, bytes]:
    return {
        path.relative_to(run_dir).as_posix(): path.read_bytes()
        for path in sorted(run_dir.rglob("*"))
        if path.is_file()
    }


def test_the_header_reads_back(journal, header, run_dir) -> None:
    assert journal.header == header
    assert Journal.open(run_dir, readonly=True).header == header


def test_a_second_create_is_refused(journal, header, run_dir) -> None:
    with pytest.raises(RunDirectoryError, match=f"pid {os.getpid()}"):
        Journal.create(run_dir, header)
    journal.close()
    with pytest.raises(RunDirectoryError, match=r"holds a journal.*--resume"):
        Journal.create(run_dir, header)


def test_the_remains_of_a_journal_are_not_built_upon(journal, header, run_dir, make_steps) -> None:
    """A stale log or stale segments would be taken for the new run's."""
    make_steps(journal, 1)
    journal.close()
    (run_dir / "journal.sqlite").unlink()
    with pytest.raises(RunDirectoryError, match="remains of a journal"):
        Journal.create(run_dir, header)


def test_opening_nothing_says_so(tmp_path) -> None:
    for readonly in (False, True):
        with pytest.raises(RunDirectoryError, match="holds no journal"):
            Journal.open(tmp_path, readonly=readonly)
    with pytest.raises(RunDirectoryError, match="holds no journal"):
        verify_segments(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_run_directory_that_is_a_file_is_refused(tmp_path, header) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunDirectoryError, match="is a file"):
        Journal.create(tmp_path / "file", header)
    with pytest.raises(StorageError, match="a file is in the way"):
        Journal.create(tmp_path / "file" / "run", header)


def test_a_second_writer_is_told_the_pid_of_the_first(journal, run_dir) -> None:
    journal.close()
    with python(HOLD + "\n    print('held', flush=True); sys.stdin.read()", run_dir) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunDirectoryError, match=f"pid {holder.pid}"):
            Journal.open(run_dir)
        holder.kill()
    with Journal.open(run_dir) as successor:  # the lock died with its owner
        assert successor.next_draw_id() == 1


def test_a_forked_worker_that_outlives_the_writer_does_not_keep_the_lock(journal, run_dir) -> None:
    journal.close()
    orphan = """
    ready, told = os.pipe()
    if os.fork() == 0:
        os.write(told, b"x")
        sys.stdin.read()
        os._exit(0)
    os.read(ready, 1)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    writer = python(HOLD + orphan, run_dir)
    try:
        writer.wait()  # the worker is there and waits for the end of its stdin
        with Journal.open(run_dir) as successor:
            assert successor.next_draw_id() == 1
    finally:
        writer.stdin.close()
        assert writer.stdout.read() == ""  # ends when the worker has
        writer.stdout.close()


def test_a_reader_follows_a_live_writer(journal, run_dir, make_steps) -> None:
    make_steps(journal, 1)
    with Journal.open(run_dir, readonly=True) as reader:
        assert reader.last_finished_step() == 1
        make_steps(journal, 2)
        assert reader.last_finished_step() == 3
        assert reader.ledger() == journal.ledger()
        assert reader.group(5).draw.draw_id == 5
        assert verify_segments(run_dir) == []
    make_steps(journal, 1)


def test_a_reader_of_a_closed_journal_writes_nothing(journal, run_dir, make_steps) -> None:
    make_steps(journal, 2)
    journal.close()
    before = files_of(run_dir)
    with Journal.open(run_dir, readonly=True) as reader:
        assert reader.ledger().balanced
        assert files_of(run_dir) == before
    assert verify_segments(run_dir) == []
    assert files_of(run_dir) == before


def test_a_reader_that_came_first_sees_the_writer_that_came_later(
    journal, run_dir, make_steps
) -> None:
    journal.close()
    with Journal.open(run_dir, readonly=True) as reader:
        assert reader.last_finished_step() == 0
        with Journal.open(run_dir) as writer:
            make_steps(writer, 3)
            assert reader.last_finished_step() == 3
        assert reader.last_finished_step() == 3
    with Journal.open(run_dir) as writer:
        make_steps(writer, 1)
        assert writer.ledger().balanced


def test_a_reader_cannot_write(journal, run_dir, make_draw) -> None:
    with (
        Journal.open(run_dir, readonly=True) as reader,
        pytest.raises(JournalError, match="open read-only"),
    ):
        reader.record_draw(make_draw(0))


def test_a_closed_journal_says_so(journal, make_draw) -> None:
    journal.close()
    journal.close()
    with pytest.raises(JournalError, match="the journal is closed"):
        journal.record_draw(make_draw(0))
    with pytest.raises(JournalError, match="the journal is closed"):
        journal.ledger()


READ_AND_REFUSE = """
import sys
from pathlib import Path
from posttrain.errors import StorageError
from posttrain.journal import Journal, verify_segments
run_dir, header_of = Path(sys.argv[1]), None
with Journal.open(run_dir, readonly=True) as reader:
    print(reader.last_finished_step(), reader.ledger().balanced, reader.group(0).draw.draw_id)
    header_of = reader.header
print(verify_segments(run_dir))
for attempt in (lambda: Journal.open(run_dir), lambda: Journal.create(run_dir / "x", header_of)):
    try:
        attempt()
    except StorageError as error:
        print(error)
"""


@pytest.mark.parametrize("end", ["closed", "killed"])
def test_a_read_only_directory_can_be_read_and_refuses_writers(
    journal, run_dir, make_steps, end
) -> None:
    if end == "closed":
        make_steps(journal, 2)
        journal.close()
    else:
        journal.close()
        shutil.copytree(run_dir, run_dir.with_name("alive"))
        run_dir = run_dir.with_name("alive")
        writer = Journal.open(run_dir)
        make_steps(writer, 2)
        shutil.copytree(run_dir, run_dir.with_name("killed"))  # what a kill leaves: log and all
        writer.close()
        run_dir = run_dir.with_name("killed")
        assert (run_dir / "journal.sqlite-wal").stat().st_size > 0
    script = 'mount --bind "$2" "$2"; mount -o remount,ro,bind "$2"; exec "$1" -c "$3" "$2"'
    done = in_private_mounts(script, run_dir, READ_AND_REFUSE)
    assert done.returncode == 0, done.stderr
    read, problems, refused_open, refused_create = done.stdout.splitlines()
    assert (read, problems) == ("2 True 0", "[]")
    for message in (refused_open, refused_create):
        assert "Read-only file system" in message
        assert str(run_dir) in message
        assert "use a run directory that can be written" in message


@pytest.mark.parametrize(
    ("version", "remedy"),
    [
        (SCHEMA_VERSION - 1, r"an older posttrain.*go on with posttrain 0\.1\.0"),
        (SCHEMA_VERSION + 1, r"a newer posttrain.*update posttrain to posttrain 0\.1\.0"),
    ],
)
@pytest.mark.parametrize("readonly", [False, True])
def test_a_journal_of_another_schema_says_what_to_do(
    journal, run_dir, version, remedy, readonly
) -> None:
    journal.close()
    connection = sqlite3.connect(run_dir / "journal.sqlite")
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    with pytest.raises(SchemaVersionError, match=remedy):
        Journal.open(run_dir, readonly=readonly)


def test_a_database_of_another_program_is_left_alone(run_dir) -> None:
    run_dir.mkdir()
    connection = sqlite3.connect(run_dir / "journal.sqlite")
    connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    with pytest.raises(RunDirectoryError, match="another program"):
        Journal.open(run_dir)


def test_importing_the_journal_loads_no_tensor_library() -> None:
    code = "import sys, posttrain.journal; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"

"""A grader worker that hangs, dies, lies or floods costs one call and leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain.rewards.worker import (
    WorkerCrash,
    WorkerPool,
    WorkerRaised,
    WorkerStartError,
    WorkerTimeout,
)

SOURCE = """
import os, signal, subprocess, sys, threading, time

def double(x): return 2 * x
def pid(): return os.getpid()
def hang():
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True: time.sleep(1)
def native_hang(): return len(str(7 ** (7 ** 9)))
def leave(status): os._exit(status)
def segfault(): os.kill(os.getpid(), signal.SIGSEGV)
def greedy(): return len(bytearray(10 * 2**30))
def exit_politely(): sys.exit(0)
def raises(): raise KeyError("no such thing")
def no_json(): return object()
def talk():
    print('{"ok": true, "value": 1}'); sys.stdout.flush()
    os.write(1, b"x" * 3_000_000); os.write(2, bytes(range(256)))
    return "said"
def read(): return sys.stdin.read()
def ask(): return input("reward? ")
def spawn(path, holding):
    child = subprocess.Popen(["sleep", "600"], close_fds=not holding)
    with open(path, "w") as f: f.write(str(child.pid))
def spawn_and_die(path):
    for fd in range(3, 64):
        try: os.set_inheritable(fd, True)
        except OSError: pass
    spawn(path, True)
    os._exit(3)
def spawn_and_hang(path):
    spawn(path, True)
    hang()
def note_and_hang(path):
    open(path, "w").close()
    hang()
def fork(x):
    if os.fork() == 0: return "from the fork"
    os.wait()
    return x
def alarmed():
    seen = []
    signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
    signal.raise_signal(signal.SIGALRM)
    return len(seen)
def modules(): return sorted(sys.modules)
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("worker") / "functions.py"
    path.write_text(SOURCE)
    return f"{path}:double"


@pytest.fixture(scope="module")
def pool(target: str) -> Iterator[WorkerPool]:
    pool = WorkerPool(target, timeout_s=10.0, memory_limit_mb=1024)
    yield pool
    pool.close_blocking()


@pytest.fixture(scope="module")
def hasty(target: str) -> Iterator[WorkerPool]:
    """For calls that never end."""
    pool = WorkerPool(target, timeout_s=1.5, memory_limit_mb=1024)
    yield pool
    pool.close_blocking()


def wait_until_gone(pid: int, is_running: Callable[[int], bool]) -> None:
    """A killed process that is not our child dies at a time of its own."""
    deadline = time.monotonic() + 30
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(pid)


def call(pool: WorkerPool, function: str | None, **kwargs: Any) -> Any:
    return asyncio.run(pool.call(function, kwargs))


@pytest.mark.parametrize("function", ["hang", "native_hang"])
def test_a_hung_worker_is_killed_and_the_next_call_works(
    hasty: WorkerPool, function: str, is_running: Callable[[int], bool]
) -> None:
    """Case c10: whether it ignores every signal or never leaves native code."""
    pid = call(hasty, "pid")
    with pytest.raises(WorkerTimeout, match=r"1\.5 s"):
        call(hasty, function)
    assert not is_running(pid)
    assert call(hasty, None, x=21) == 42


@pytest.mark.parametrize(
    ("function", "kwargs", "message"),
    [
        ("leave", {"status": 0}, "status 0"),
        ("segfault", {}, "SIGSEGV"),
        ("greedy", {}, "out of memory"),
    ],
)
def test_a_dead_worker_is_a_crash_that_says_how_and_the_next_call_works(
    pool: WorkerPool, function: str, kwargs: dict[str, Any], message: str
) -> None:
    """Case c17: an early exit with status 0 is no result."""
    with pytest.raises(WorkerCrash, match=message):
        call(pool, function, **kwargs)
    assert call(pool, None, x=1) == 2


def test_what_a_function_raises_comes_back_with_its_place(pool: WorkerPool) -> None:
    with pytest.raises(WorkerRaised) as caught:
        call(pool, "raises")
    assert caught.value.error_type == "KeyError"
    assert "functions.py" in caught.value.traceback_tail
    with pytest.raises(WorkerRaised, match="SystemExit"):
        call(pool, "exit_politely")
    with pytest.raises(WorkerRaised, match="not JSON serializable"):
        call(pool, "no_json")


def test_printing_cannot_corrupt_the_protocol_and_stdin_is_empty(pool: WorkerPool) -> None:
    assert call(pool, "talk") == "said"
    assert call(pool, "read") == ""
    with pytest.raises(WorkerRaised, match="EOFError"):
        call(pool, "ask")


def test_a_fork_of_the_function_has_no_say(pool: WorkerPool) -> None:
    assert call(pool, "fork", x="from the parent") == "from the parent"
    assert call(pool, None, x=4) == 8


def test_a_child_that_holds_the_pipes_does_not_hide_the_death_of_its_parent(
    pool: WorkerPool, tmp_path: Path, is_running: Callable[[int], bool]
) -> None:
    note = tmp_path / "pid"
    with pytest.raises(WorkerCrash, match="status 3"):
        call(pool, "spawn_and_die", path=str(note))
    wait_until_gone(int(note.read_text()), is_running)


def test_a_timeout_kills_the_children_of_the_function_too(
    hasty: WorkerPool, tmp_path: Path, is_running: Callable[[int], bool]
) -> None:
    note = tmp_path / "pid"
    with pytest.raises(WorkerTimeout):
        call(hasty, "spawn_and_hang", path=str(note))
    wait_until_gone(int(note.read_text()), is_running)


def test_a_worker_starts_with_a_clean_signal_mask(target: str) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pool = WorkerPool(target, timeout_s=10.0)
        assert call(pool, "alarmed") == 1
        pool.close_blocking()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_worker_loads_nothing_heavy(pool: WorkerPool) -> None:
    assert not {"torch", "numpy", "transformers", "pydantic"} & set(call(pool, "modules"))


def test_many_calls_share_few_workers_from_several_loops(target: str) -> None:
    pool = WorkerPool(target, num_workers=2, timeout_s=10.0)
    results: list[int] = []

    async def many() -> list[int]:
        return await asyncio.gather(*(pool.call(None, {"x": i}) for i in range(50)))

    thread = threading.Thread(target=lambda: results.extend(asyncio.run(many())))
    thread.start()
    assert asyncio.run(many()) == [2 * i for i in range(50)]
    thread.join()
    assert results == [2 * i for i in range(50)]
    pids = {call(pool, "pid") for _ in range(8)}
    assert len(pids) <= 2
    pool.close_blocking()


def test_a_fresh_call_gets_a_new_worker(pool: WorkerPool) -> None:
    first = call(pool, "pid")
    assert call(pool, "pid") == first
    assert asyncio.run(pool.call("pid", {}, fresh=True)) != first


def test_a_cancelled_call_does_not_stop_the_next_one(pool: WorkerPool) -> None:
    async def cancel_one() -> int:
        task = asyncio.create_task(pool.call(None, {"x": 1}))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await pool.call(None, {"x": 2})

    assert asyncio.run(cancel_one()) == 4


def test_closing_ends_calls_in_flight_and_leaves_no_process(
    target: str, child_pids: Callable[[], set[int]], tmp_path: Path
) -> None:
    before = child_pids()
    pool = WorkerPool(target, timeout_s=600.0)
    note = tmp_path / "started"

    async def close_during_a_call() -> None:
        hanging = asyncio.create_task(pool.call("note_and_hang", {"path": str(note)}))
        queued = asyncio.create_task(pool.call(None, {"x": 1}))
        while not note.exists():
            await asyncio.sleep(0.01)
        await pool.close()
        for task in (hanging, queued):
            with pytest.raises(WorkerCrash, match="closed"):
                await task
        await pool.close()
        with pytest.raises(WorkerCrash, match="closed"):
            await pool.call(None, {"x": 1})

    asyncio.run(close_during_a_call())
    assert child_pids() == before


def test_a_forgotten_pool_leaves_no_process(
    target: str, child_pids: Callable[[], set[int]]
) -> None:
    before = child_pids()
    pool = WorkerPool(target, timeout_s=10.0)
    assert call(pool, None, x=1) == 2
    assert child_pids() != before
    del pool
    gc.collect()
    assert child_pids() == before


def test_a_worker_does_not_outlive_a_killed_parent(
    target: str, is_running: Callable[[int], bool]
) -> None:
    program = (
        "import sys\n"
        "from posttrain.rewards.worker import WorkerPool\n"
        f"pool = WorkerPool({target!r}, timeout_s=600.0)\n"
        "print(pool.submit('pid', {}).result(), flush=True)\n"
        "pool.submit('native_hang', {}).result()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
    wait_until_gone(worker, is_running)


@pytest.mark.parametrize(
    ("source", "startup_timeout_s", "message"),
    [
        ("import no_such_module_here\n", 60.0, "no_such_module_here"),
        ("import os\nos._exit(5)\n", 60.0, "status 5"),
        ("import time\nwhile True: time.sleep(1)\n", 1.0, "within 1 s"),
    ],
)
def test_a_target_that_cannot_be_loaded_is_a_start_error(
    tmp_path: Path, source: str, startup_timeout_s: float, message: str
) -> None:
    path = tmp_path / "broken.py"
    path.write_text(source)
    pool = WorkerPool(f"{path}:f", timeout_s=10.0, startup_timeout_s=startup_timeout_s)
    with pytest.raises(WorkerStartError, match=message):
        call(pool, None)
    pool.close_blocking()

"""A pool of grader worker processes: results, or errors that say what happened, in bounded time.

Signals cannot interrupt native code and work in one thread only, so nothing here uses them for
timing: a worker that does not answer is killed from outside (huggingface/Math-Verify#65, #55).
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from posttrain.rewards.worker_process import (
    WorkerCrash,
    WorkerError,
    WorkerPlan,
    WorkerProcess,
    WorkerRaised,
    WorkerStartError,
    WorkerTimeout,
)

__all__ = [
    "WorkerCrash",
    "WorkerError",
    "WorkerPool",
    "WorkerRaised",
    "WorkerStartError",
    "WorkerTimeout",
]


@dataclass(frozen=True, slots=True)
class _Job:
    function: str | None
    kwargs_json: str
    fresh: bool
    future: Future[Any] = field(default_factory=Future)


_Jobs = queue.SimpleQueue["_Job | None"]


class WorkerPool:
    """Runs functions of one module in `num_workers` processes, started at the first call.

    `target` is "package.module:DEFAULT_FUNCTION" or "FILE.py:DEFAULT_FUNCTION". The module is
    imported by the workers only; when `setup` is given they call its `setup(**setup)` once, within
    `startup_timeout_s`. Arguments and results are JSON data. `timeout_s` bounds one call, without
    the time it waits for a free worker. May be used from any thread and any event loop.
    """

    def __init__(
        self,
        target: str,
        num_workers: int = 1,
        *,
        timeout_s: float,
        memory_limit_mb: int | None = None,
        startup_timeout_s: float = 60.0,
        setup: Mapping[str, Any] | None = None,
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers is {num_workers}; a pool needs at least 1")
        self._plan = WorkerPlan(target, setup, timeout_s, startup_timeout_s, memory_limit_mb)
        self._num_workers = num_workers
        self._jobs: _Jobs = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self._lock = threading.Lock()
        # Also runs at interpreter exit, so a forgotten pool leaves no process behind.
        self._finalizer = weakref.finalize(self, _shut_down, self._jobs, self._threads, self._stop)

    async def call(
        self, function: str | None, kwargs: Mapping[str, Any], *, fresh: bool = False
    ) -> Any:
        """The result of `function` (None: the target's default) in a worker.

        `fresh` runs it in a newly started worker. Raises WorkerTimeout, WorkerCrash, WorkerRaised,
        WorkerStartError; TypeError or ValueError when `kwargs` is no JSON data.
        """
        return await asyncio.wrap_future(self.submit(function, kwargs, fresh=fresh))

    def submit(
        self, function: str | None, kwargs: Mapping[str, Any], *, fresh: bool = False
    ) -> Future[Any]:
        """`call` for code without an event loop."""
        job = _Job(function, json.dumps(dict(kwargs)), fresh)
        with self._lock:
            if self._stop.is_set():
                raise WorkerCrash(f"the worker pool of {self._plan.target} is closed")
            while len(self._threads) < self._num_workers:
                thread = threading.Thread(
                    target=_serve,
                    args=(self._jobs, self._plan, self._stop),
                    name=f"grader-{len(self._threads)}",
                    daemon=True,
                )
                self._threads.append(thread)
                thread.start()
            self._jobs.put(job)
        return job.future

    async def close(self) -> None:
        """Kill the workers and end their threads. Calls in flight raise WorkerCrash."""
        await asyncio.to_thread(self.close_blocking)

    def close_blocking(self) -> None:
        """`close` for code without an event loop. May be called again."""
        with self._lock:
            self._stop.set()
        self._finalizer()


def _shut_down(jobs: _Jobs, threads: list[threading.Thread], stop: threading.Event) -> None:
    stop.set()
    for _ in threads:
        jobs.put(None)
    for thread in threads:
        if thread is not threading.current_thread():  # a collected pool is finalized anywhere
            thread.join()


def _serve(jobs: _Jobs, plan: WorkerPlan, stop: threading.Event) -> None:
    """One thread, one worker. The thread outlives its worker: see `die_with_parent`."""
    process: WorkerProcess | None = None
    while (job := jobs.get()) is not None:
        if job.future.set_running_or_notify_cancel():
            process = _run_job(job, process, plan, stop)
    if process is not None:
        process.kill()


def _run_job(
    job: _Job, process: WorkerProcess | None, plan: WorkerPlan, stop: threading.Event
) -> WorkerProcess | None:
    """Settle the job's future. Returns the worker if it can take another job."""
    try:
        if process is not None and (job.fresh or process.exited()):
            process.kill()
            process = None
        if stop.is_set():
            raise WorkerCrash(f"the worker pool of {plan.target} was closed")
        if process is None:
            process = WorkerProcess(plan, stop)
        value = process.call(job.function, job.kwargs_json)
    except WorkerRaised as error:
        job.future.set_exception(error)
        return process
    except Exception as error:  # boundary: whatever it is goes to the caller, the thread lives on
        if process is not None:
            process.kill()
        job.future.set_exception(error)
        return None
    job.future.set_result(value)
    return process

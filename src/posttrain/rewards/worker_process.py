"""One grader worker as its parent sees it: start, exchange, kill.

Everything here runs in the one thread that owns the worker (`posttrain.rewards.worker`), because
on Linux the worker is told to die when the *thread* that started it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.errors import PosttrainError

TICK_S = 0.05  # how often a waiting owner looks whether the worker died or the pool was closed
MAX_REPLY_BYTES = 64 * 1024 * 1024
MAX_LOG_BYTES = 8192


class WorkerError(PosttrainError, RuntimeError):
    """A call to a grader worker gave no result."""


class WorkerTimeout(WorkerError, TimeoutError):
    """The worker did not answer in time and was killed."""


class WorkerCrash(WorkerError):
    """The worker died, ran out of memory, or was closed during the call."""


class WorkerStartError(WorkerError):
    """The worker could not be started or its target could not be imported."""


class WorkerRaised(WorkerError):
    """The function raised. `error_type`, `message` and `traceback_tail` say what."""

    def __init__(self, error_type: str, message: str, traceback_tail: str) -> None:
        super().__init__(f"{error_type}: {message}" if message else error_type)
        self.error_type = error_type
        self.message = message
        self.traceback_tail = traceback_tail


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """How to start a worker and how long to wait for it. Times in seconds, memory in MiB."""

    target: str
    setup: Mapping[str, Any] | None
    timeout_s: float
    startup_timeout_s: float
    memory_limit_mb: int | None


class WorkerProcess:
    """A started worker in its own session, with two private pipes and a drained output pipe.

    The constructor returns when the target is imported. Raises WorkerStartError.
    """

    def __init__(self, plan: WorkerPlan, stop: threading.Event) -> None:
        self._plan = plan
        self._stop = stop
        self._received = bytearray()
        self._log = bytearray()
        self._log_open = True
        request_read, self._request_fd = os.pipe()
        self._reply_fd, reply_write = os.pipe()
        self._log_fd, log_write = os.pipe()
        nonce = secrets.token_hex(8)
        config = {
            "target": plan.target,
            "setup": None if plan.setup is None else dict(plan.setup),
            "memory_limit_mb": plan.memory_limit_mb,
            "parent_pid": os.getpid(),
            "request_fd": request_read,
            "reply_fd": reply_write,
            "nonce": nonce,
        }
        command = [sys.executable, "-P", "-u", "-m", "posttrain.rewards.worker_main"]
        try:
            self._process = subprocess.Popen(
                [*command, json.dumps(config)],
                stdin=subprocess.DEVNULL,
                stdout=log_write,
                stderr=log_write,
                pass_fds=(request_read, reply_write),
                start_new_session=True,
                env=_environment(),
            )
        except OSError as error:
            self._close_pipes()
            raise WorkerStartError(f"the grader worker could not be started: {error}") from error
        finally:
            for fd in (request_read, reply_write, log_write):
                os.close(fd)
        for fd in (self._request_fd, self._reply_fd, self._log_fd):
            os.set_blocking(fd, False)
        self._wait_until_ready(nonce)

    def _wait_until_ready(self, nonce: str) -> None:
        plan = self._plan
        try:
            self._result(self._exchange(b"", nonce, plan.startup_timeout_s))
        except WorkerError as error:
            self.kill()
            detail = error.traceback_tail if isinstance(error, WorkerRaised) else str(error)
            raise WorkerStartError(
                f"the grader worker for {plan.target} did not start: {detail}"
            ) from error

    def call(self, function: str | None, kwargs_json: str) -> Any:
        """The function's result. After WorkerTimeout or WorkerCrash the worker is useless."""
        nonce = secrets.token_hex(8)
        head = json.dumps({"function": function, "nonce": nonce})
        body = f'{head[:-1]}, "kwargs": {kwargs_json}}}'.encode()
        frame = struct.pack(">I", len(body)) + body
        return self._result(self._exchange(frame, nonce, self._plan.timeout_s))

    def exited(self) -> bool:
        """Whether the process has ended. It stays a zombie, so that its group id stays ours."""
        if not hasattr(os, "waitid"):  # then the end of the reply pipe tells
            return False
        try:
            flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
            return os.waitid(os.P_PID, self._process.pid, flags) is not None
        except ChildProcessError:
            return True

    def kill(self) -> int:
        """SIGKILL the worker and its process group, reap it, close the pipes; its status."""
        if self._process.returncode is not None:  # reaped: the group id may be somebody else's now
            return self._process.returncode
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait()
        self._close_pipes()
        return status

    def _exchange(self, frame: bytes, nonce: str, timeout_s: float) -> dict[str, Any]:
        rest = memoryview(frame)
        deadline = time.monotonic() + timeout_s
        while True:
            reply = self._take_reply(nonce)
            if reply is not None:
                return reply
            if self._stop.is_set():
                raise WorkerCrash("the grader was closed during the call")
            left = deadline - time.monotonic()
            if left <= 0:
                raise WorkerTimeout(f"no result within {timeout_s:g} s; the worker was killed")
            rest = self._pump(rest, min(left, TICK_S))

    def _pump(self, rest: memoryview, wait_s: float) -> memoryview:
        """Move bytes in all directions once; returns what is still to be sent."""
        poll = select.poll()
        poll.register(self._reply_fd, select.POLLIN)
        if self._log_open:
            poll.register(self._log_fd, select.POLLIN)
        if rest:
            poll.register(self._request_fd, select.POLLOUT)
        ready = {fd for fd, _ in poll.poll(max(1, int(wait_s * 1000)))}
        if self._log_fd in ready:
            self._drain_log()
        if self._request_fd in ready and rest:
            try:
                rest = rest[os.write(self._request_fd, rest) :]
            except BlockingIOError:
                pass
            except BrokenPipeError:
                self._raise_crash()
        if self._reply_fd in ready:
            chunk = _read(self._reply_fd)
            if chunk == b"":
                self._raise_crash()
            self._received += chunk or b""
        elif self.exited():  # a child of the worker holds the pipe open, so no end was seen
            self._raise_crash()
        return rest

    def _take_reply(self, nonce: str) -> dict[str, Any] | None:
        """The reply to this call, if it is complete. Frames of other calls are thrown away."""
        while len(self._received) >= 4:
            (length,) = struct.unpack(">I", self._received[:4])
            if length > MAX_REPLY_BYTES:
                raise WorkerCrash(f"the worker announced a reply of {length} bytes")
            if len(self._received) < 4 + length:
                return None
            body = bytes(self._received[4 : 4 + length])
            del self._received[: 4 + length]
            try:
                reply = json.loads(body)
            except ValueError as error:
                raise WorkerCrash(f"the worker's reply is not JSON: {error}") from error
            if isinstance(reply, dict) and reply.get("nonce") == nonce:
                return reply
        return None

    def _result(self, reply: dict[str, Any]) -> Any:
        if reply["ok"]:
            return reply["value"]
        if reply["out_of_memory"]:
            raise WorkerCrash(
                f"out of memory (limit {self._plan.memory_limit_mb} MiB): {reply['message']}"
            )
        raise WorkerRaised(reply["type"], reply["message"], reply["traceback"])

    def _raise_crash(self) -> None:
        self._drain_log()
        for _ in range(100):  # it closed its pipe: give it a moment to say how it ended
            if self.exited():
                break
            time.sleep(0.005)
        died_itself = self.exited()
        status = self.kill()
        if not died_itself:
            fact = "closed its pipe"
        elif status < 0:
            fact = f"was killed by {_signal_name(-status)}"
        else:
            fact = f"exited with status {status}"
        tail = self._log.decode(errors="replace").strip()[-600:]
        raise WorkerCrash(
            f"the worker {fact} before it replied" + (f"; it last wrote: {tail}" if tail else "")
        )

    def _drain_log(self) -> None:
        """Read what the user's function printed and keep the end of it."""
        for _ in range(64):  # bounded: a flood must not keep the owner from watching the clock
            chunk = _read(self._log_fd)
            if not chunk:
                self._log_open = chunk is None
                break
            self._log += chunk
        del self._log[:-MAX_LOG_BYTES]

    def _close_pipes(self) -> None:
        for name in ("_request_fd", "_reply_fd", "_log_fd"):
            fd = getattr(self, name)
            if fd >= 0:
                os.close(fd)
                setattr(self, name, -1)


def _read(fd: int) -> bytes | None:
    """Some bytes, b"" at the end, None when there is nothing now."""
    try:
        return os.read(fd, 65536)
    except BlockingIOError:
        return None


def _environment() -> dict[str, str]:
    """The parent's, with one thread per library and reproducible set orders unless set."""
    defaults = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    return {**defaults, **os.environ}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

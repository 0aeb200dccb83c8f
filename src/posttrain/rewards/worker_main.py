"""The program that runs inside a grader worker: read a call, run the function, reply. Repeat.

Started by `posttrain.rewards.worker_process`. Standard library only, so that it starts quickly;
what else is imported is the target's own choice. Requests and replies are JSON behind a four-byte
big-endian length, on two pipes that nobody else knows: stdin, stdout and stderr belong to the
user's function and are never part of the protocol.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import struct
import sys
import traceback
from types import ModuleType
from typing import Any

from posttrain.targets import load_module, parse_target

PR_SET_PDEATHSIG = 1  # linux/prctl.h
TRACEBACK_LINES = 12


def main(config_text: str) -> None:
    """Serve until the parent closes the request pipe or dies. Never returns."""
    config = json.loads(config_text)
    die_with_parent(config["parent_pid"])
    # The parent's mask is inherited, and a blocked SIGALRM would break a user's own alarm.
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    limit_resources(config["memory_limit_mb"])
    faulthandler.enable()
    own_pid = os.getpid()
    reply_fd, request_fd = config["reply_fd"], config["request_fd"]
    for fd in (reply_fd, request_fd):
        os.set_inheritable(fd, False)
    target = parse_target(config["target"])
    module, failure = load(config)
    send(reply_fd, {"nonce": config["nonce"], **failure})
    while (request := receive(request_fd)) is not None:
        name = request["function"] or target.function
        reply = run(module, name, request["kwargs"])
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        if os.getpid() != own_pid:
            os._exit(0)  # a fork made by the user's function came back here: it has no say
        send(reply_fd, {"nonce": request["nonce"], **reply})
    os._exit(0)  # not sys.exit: a user's threads and exit hooks must not keep the worker alive


def load(config: dict[str, Any]) -> tuple[ModuleType | None, dict[str, Any]]:
    """Import the target and run its `setup`; what it raised goes to the parent, who decides."""
    try:
        module = load_module(parse_target(config["target"]))
        if config["setup"] is not None:
            module.setup(**config["setup"])
    except BaseException as error:  # boundary: reported to the parent as a failed start
        return None, describe_error(error)
    return module, {"ok": True, "value": None}


def run(module: ModuleType | None, name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Call one function. The reply is plain JSON data, whatever the function does."""
    try:
        reply = {"ok": True, "value": getattr(module, name)(**kwargs)}
        json.dumps(reply)
    except BaseException as error:  # boundary: SystemExit too; recorded in the reply
        return describe_error(error)
    return reply


def describe_error(error: BaseException) -> dict[str, Any]:
    """An exception as JSON data: type, message, last lines of the traceback."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    return {
        "ok": False,
        "type": type(error).__name__,
        "message": str(error)[:2000],
        "traceback": "\n".join(lines[-TRACEBACK_LINES:]),
        "out_of_memory": isinstance(error, MemoryError),
    }


def die_with_parent(parent_pid: int) -> None:
    """SIGKILL for this process when the thread that started it ends (Linux; prctl(2))."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)  # the parent died before the request above took effect


def limit_resources(memory_limit_mb: int | None) -> None:
    """Address space up to the limit; no core files."""
    import resource  # absent on platforms without setrlimit

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_limit_mb is not None and sys.platform == "linux":
        limit = memory_limit_mb * 1024 * 1024
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def send(fd: int, message: dict[str, Any]) -> None:
    """Write one framed message. Exits when the parent is gone."""
    body = json.dumps(message).encode()
    rest = memoryview(struct.pack(">I", len(body)) + body)
    try:
        while rest:
            rest = rest[os.write(fd, rest) :]
    except BrokenPipeError:
        os._exit(1)


def receive(fd: int) -> dict[str, Any] | None:
    """Read one framed message; None at the end of the pipe."""
    header = _read_exactly(fd, 4)
    body = header and _read_exactly(fd, struct.unpack(">I", header)[0])
    return json.loads(body) if body else None


def _read_exactly(fd: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        chunk = os.read(fd, count - len(data))
        if not chunk:
            return b""
        data += chunk
    return data


if __name__ == "__main__":
    main(sys.argv[1])

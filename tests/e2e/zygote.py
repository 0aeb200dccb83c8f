"""Imports the program once and forks a child for every command line it is sent.

Usage: python zygote.py SOCKET_FD. A request is one JSON object with the descriptors for the child's
standard output and error beside it:

    {"argv": [...], "cwd": DIR, "env": {...}, "deaths": [...], "max_file_bytes": N or null}

The answer is {"pid": PID}; {"wait": PID} is answered with {"status": STATUS}, which is negative for
a signal.
A death is {"at": "module:Class.method", "nth": N, "after": bool, "signal": S} or {"line": N}: the
child sends itself the signal around the N-th call, or SIGKILL at the N-th line of posttrain that it
runs. A child that hangs ends by SIGALRM.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch  # noqa: F401  # what takes seconds to import is imported before the forks
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: F401

import posttrain
import posttrain.commands.export
import posttrain.commands.replay
import posttrain.commands.train
import posttrain.replay
import posttrain.run
from posttrain.cli import main

SOURCE = str(Path(posttrain.__file__).parent)
LIMIT_S = 240


def strike_at(at: str, nth: int, after: bool, number: int) -> None:
    """Send this process a signal around the `nth` call of a function."""
    module_name, _, path = at.partition(":")
    owner: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original = getattr(owner, name)
    calls = 0

    @functools.wraps(original)
    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        mine = calls == nth
        if mine and not after:
            os.kill(os.getpid(), number)
        result = original(*args, **kwargs)
        if mine and after:
            os.kill(os.getpid(), number)
        return result

    setattr(owner, name, counting)


def die_at_line(countdown: int) -> None:
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


def run_child(request: dict[str, Any], descriptors: list[int]) -> None:
    signal.alarm(LIMIT_S)
    for target, descriptor in zip((1, 2), descriptors, strict=True):
        os.dup2(descriptor, target)
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    if limit := request["max_file_bytes"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    for death in request["deaths"]:
        if "line" in death:
            die_at_line(death["line"])
        else:
            strike_at(death["at"], death["nth"], death["after"], death["signal"])
    sys.argv = ["posttrain", *request["argv"]]
    main()


def fork(request: dict[str, Any], descriptors: list[int], server: socket.socket) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        server.close()
        run_child(request, descriptors)
        status = 0
    except SystemExit as stop:
        status = int(stop.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def serve(server: socket.socket) -> None:
    server.sendall(b"ready\n")
    while True:
        message, descriptors, _, _ = socket.recv_fds(server, 1 << 20, 2)
        if not message:
            return
        request = json.loads(message)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            answer = {"status": os.waitstatus_to_exitcode(status)}
        else:
            answer = {"pid": fork(request, descriptors, server)}
            for descriptor in descriptors:
                os.close(descriptor)
        server.sendall(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # torch takes seconds to tidy up

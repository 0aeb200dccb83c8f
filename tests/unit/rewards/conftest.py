"""Episodes to grade, and what is left of grader workers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.rewards import MathReward
from posttrain.types import Completion, FinishReason, Hidden, Message, Task, Turn, Verdict


def _task(answer: Any, prompt: str = "?", **metadata: Any) -> Task:
    return Task("t1", (Message.text("user", prompt),), Hidden({"answer": answer}), metadata)


def _turn(text: str) -> Turn:
    return Turn(np.array([1], np.int32), Completion.build([2], [-0.1], [0], FinishReason.EOS, text))


def _children() -> set[int]:
    """Living children of this process, by /proc; zombies count."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == os.getpid():
            found.add(int(stat.parent.name))
    return found


def _is_running(pid: int) -> bool:
    """Whether a process that is not our child runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture(scope="session")
def make_task() -> Callable[..., Task]:
    return _task


@pytest.fixture(scope="session")
def make_turn() -> Callable[[str], Turn]:
    return _turn


@pytest.fixture(scope="session")
def child_pids() -> Callable[[], set[int]]:
    return _children


@pytest.fixture(scope="session")
def is_running() -> Callable[[int], bool]:
    return _is_running


@pytest.fixture(scope="session")
def math_reward() -> Iterator[MathReward]:
    """One pool of two workers for all tests of answers."""
    reward = MathReward(timeout_s=20.0, num_workers=2)
    yield reward
    asyncio.run(reward.close())


@pytest.fixture
def score(math_reward: MathReward) -> Callable[..., Verdict]:
    """Grade one completion against a gold answer."""

    def grade(text: str, gold: Any, prompt: str = "?") -> Verdict:
        return asyncio.run(math_reward.score(_task(gold, prompt), [_turn(text)]))

    return grade

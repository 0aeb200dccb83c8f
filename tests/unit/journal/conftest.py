"""Small deterministic records. `kill_driver.py` reads this file too."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from posttrain.journal import Journal, RunHeader
from posttrain.types import (
    Completion,
    Draw,
    FinishReason,
    Group,
    Invalid,
    InvalidKind,
    Message,
    Observation,
    RewardTerm,
    Scored,
    StepResult,
    StopReason,
    TokenSequence,
    TrainBatch,
    Trajectory,
    Turn,
)

HEADER = RunHeader(
    recipe={"seed": 3, "algo": {"type": "grpo"}, "num_steps": 4},
    code_version="0.1.0",
    packages={"numpy": "2.0.0"},
    seed=3,
    threads=1,
    created_at="2026-01-01T00:00:00Z",
)


def draw_of(draw_id: int, num_tasks: int = 20) -> Draw:
    epoch, index = divmod(draw_id, num_tasks)
    return Draw(draw_id, f"task-{index}", epoch, seed=1000 + draw_id)


def group_of(draw: Draw, size: int = 2, policy_version: int = 0) -> Group:
    """Any group is a function of its draw, so whoever reads it back knows what it must hold."""
    rng = np.random.Generator(np.random.Philox(key=draw.seed))
    members = []
    for index in range(size):
        prompt = rng.integers(0, 99, 3).astype(np.int32)
        length = int(rng.integers(1, 5))
        ids = rng.integers(0, 99, length).astype(np.int32)
        logprobs = -rng.random(length).astype(np.float32)
        versions = np.full(length, policy_version, np.int32)
        completion = Completion(ids, logprobs, versions, FinishReason.EOS, f"answer {index}")
        sequence = TokenSequence.build(
            [*prompt, *ids], [2] * 3 + [0] * length, [0] * 3 + [*logprobs], [-1] * 3 + [*versions]
        )
        verdict = (
            Invalid(InvalidKind.REWARD_TIMEOUT, "killed after 5 s", retryable=True)
            if index and draw.draw_id % 7 == 3
            else Scored(float(index), (RewardTerm("exact", float(index)),), "evidence")
        )
        turn = Turn(prompt, completion, Observation((Message.text("user", "next"),)))
        members.append(
            Trajectory(
                draw.draw_id,
                index,
                draw.seed + index,
                (turn,),
                (sequence,),
                verdict,
                StopReason.TERMINATED,
            )
        )
    return Group(draw, tuple(members))


def batch_of(step: int, draw_ids: tuple[int, ...], dropped: dict[int, str]) -> TrainBatch:
    return TrainBatch(step, (), draw_ids, dropped, {"batch/reward_mean": 0.5})


def fingerprint_of(batch: TrainBatch) -> str:
    return hashlib.sha256(
        repr((batch.draw_ids, sorted(batch.dropped.items()))).encode()
    ).hexdigest()


def result_of(step: int, weights_hash: str) -> StepResult:
    return StepResult(step, step, weights_hash, {"learner/loss": 0.25 * step})


def run_steps(journal: Journal, num_steps: int, draws_per_step: int = 2) -> None:
    """Draw, generate and train; the last draw of every step is dropped by it."""
    for _ in range(num_steps):
        step = journal.last_finished_step() + 1
        first = journal.next_draw_id()
        draw_ids = tuple(range(first, first + draws_per_step))
        for draw_id in draw_ids:
            journal.record_draw(draw_of(draw_id))
            journal.record_group(group_of(draw_of(draw_id)))
        batch = batch_of(step, draw_ids, {draw_ids[-1]: "zero_variance"})
        journal.begin_step(batch, fingerprint_of(batch))
        journal.finish_step(result_of(step, f"weights {step}"))


@pytest.fixture
def header() -> RunHeader:
    return HEADER


@pytest.fixture
def make_draw() -> Callable[..., Draw]:
    return draw_of


@pytest.fixture
def make_group() -> Callable[..., Group]:
    return group_of


@pytest.fixture
def make_steps() -> Callable[..., None]:
    return run_steps


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def journal(run_dir: Path) -> Iterator[Journal]:
    with Journal.create(run_dir, HEADER) as journal:
        yield journal

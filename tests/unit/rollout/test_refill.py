"""Drawing on until a step has groups that teach, without losing or repeating a draw."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.tasks import make_task, user_prompt
from posttrain.journal import Journal, RunHeader
from posttrain.rollout.producer import RolloutProducer
from posttrain.types import (
    Completion,
    Draw,
    FinishReason,
    Group,
    SamplingParams,
    Scored,
    StepResult,
    StopReason,
    Task,
    TokenSequence,
    TrainBatch,
    Trajectory,
    Turn,
)

HEADER = RunHeader({}, "0", {}, seed=0, threads=1, created_at="2026-01-01")
TASK = make_task("t", user_prompt(None, "q"), {}, grader="none")
GROUPS = 4


def group_of(draw: Draw, version: int, teaches: bool) -> Group:
    completion = Completion.build([2], [-0.1], [version], FinishReason.EOS, "")
    row = TokenSequence.build([1, 2], [2, 0], [0, -0.1], [-1, version])
    turn = Turn(row.token_ids[:1], completion)
    verdict = Scored(float(teaches))
    member = Trajectory(draw.draw_id, 0, 0, (turn,), (row,), verdict, StopReason.TERMINATED)
    return Group(draw, (member,))


class Runner:
    """Groups of `teaching` draws teach; they take as many turns of the event loop as their id."""

    def __init__(self, teaching: Callable[[int], bool]) -> None:
        self.teaching = teaching
        self.version = 0
        self.ran: list[int] = []

    async def group(self, task: Task, draw: Draw, *_: Any) -> Group:
        self.ran.append(draw.draw_id)
        version = self.version
        for _ in range(draw.draw_id * 7 % 5):
            await asyncio.sleep(0)
        return group_of(draw, version, self.teaching(draw.draw_id))


class Numbers:
    def draw(self, draw_id: int) -> Draw:
        return Draw(draw_id, f"t{draw_id}", 0, draw_id)

    def task(self, draw: Draw) -> Task:
        return TASK

    def observe(self, group: Group) -> None: ...


class Killed(Exception):
    """The process is gone."""


class Rig:
    """One process: a producer over a journal on disk, steps that are begun and finished."""

    def __init__(
        self, journal: Journal, teaching: Callable[[int], bool], lag: int = 0, cap: float = 4.0
    ) -> None:
        self.journal, self.runner = journal, Runner(teaching)
        open_draws = [
            (draw, journal.group(draw.draw_id) if has_group else None)
            for draw, has_group in journal.open_draws()
        ]
        next_draw_id = journal.next_draw_id()
        self.producer = RolloutProducer(
            self.runner,  # type: ignore[arg-type]
            Numbers(),
            journal,
            SamplingParams(4),
            groups_per_step=GROUPS,
            group_size=1,
            max_policy_lag=lag,
            num_steps=10,
            teaches=lambda group: group.trajectories[0].reward > 0,
            max_refill=cap,
            next_draw_id=next_draw_id,
            num_lost=next_draw_id - len(open_draws) - len(journal.steps()) * GROUPS,
            open_draws=open_draws,
        )

    async def step(self, step: int) -> list[int]:
        self.runner.version = step - 1
        groups = await self.producer.take(step - 1)
        taken = [g.draw.draw_id for g in groups]
        assert all(step - 1 - g.min_policy_version <= 2 for g in groups)
        dropped = {d: "zero_variance" for d in taken if not self.runner.teaching(d)}
        self.journal.begin_step(TrainBatch(step, (), tuple(taken), dropped), f"f{step}")
        self.journal.finish_step(StepResult(step, step, "w", {}))
        return taken

    async def steps(self, numbers: Iterable[int]) -> list[list[int]]:
        try:
            return [await self.step(number) for number in numbers]
        finally:
            await self.producer.close()


def play(folder: Path, teaching: Callable[[int], bool], steps: int, **fields: Any) -> Any:
    with Journal.create(folder, HEADER) as journal:
        rig = Rig(journal, teaching, **fields)
        taken = asyncio.run(rig.steps(range(1, steps + 1)))
        return taken, journal.ledger(), rig.runner.ran


def every_third(draw_id: int) -> bool:
    return draw_id % 3 == 0


def nothing(draw_id: int) -> bool:
    return False


def test_a_step_draws_on_until_it_has_its_teaching_groups(tmp_path: Path) -> None:
    taken, ledger, ran = play(tmp_path / "run", every_third, 3)
    assert [sum(map(every_third, step)) for step in taken] == [GROUPS] * 3
    flat = [draw for step in taken for draw in step]
    assert flat == list(range(len(flat))), "in the order of their draws, each once"
    assert sorted(ran) == flat, "and none is generated that no step takes"
    assert ledger.balanced and ledger.open == 0
    assert (ledger.trained, dict(ledger.dropped)) == (12, {"zero_variance": len(flat) - 12})


def test_a_step_of_teaching_groups_draws_no_more(tmp_path: Path) -> None:
    taken, _, _ = play(tmp_path / "run", lambda _: True, 3)
    assert taken == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize("cap", [1.0, 1.5, 2.0])
def test_the_cap_ends_a_step_and_nothing_is_generated_beyond_it(cap: float, tmp_path: Path) -> None:
    taken, ledger, ran = play(tmp_path / "run", nothing, 3, cap=cap)
    size = int(cap * GROUPS)
    assert [len(step) for step in taken] == [size] * 3
    assert sorted(ran) == list(range(3 * size))
    assert ledger.balanced and ledger.open == 0 and ledger.drawn == 3 * size


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("teaching", [every_third, nothing, lambda d: d > 13])
def test_with_a_lag_the_bound_still_holds_and_the_ledger_balances(
    lag: int, teaching: Callable[[int], bool], tmp_path: Path
) -> None:
    with Journal.create(tmp_path / "run", HEADER) as journal:
        rig = Rig(journal, teaching, lag=lag, cap=2.0)

        async def scenario() -> list[list[int]]:
            taken = []
            for step in range(1, 8):
                taken.append(await rig.step(step))
                oldest = min(journal.group(d).min_policy_version for d in taken[-1])
                assert step - 1 - oldest <= lag
                in_flight = journal.ledger().open
                assert in_flight <= lag * GROUPS, "no more runs ahead than without refill"
            await rig.producer.close()
            return taken

        taken = asyncio.run(scenario())
        ledger = journal.ledger()
    flat = [draw for step in taken for draw in step]
    assert flat == sorted(set(flat)) and ledger.balanced
    assert ledger.drawn == len(flat) + ledger.open + dict(ledger.dropped).get("stale", 0)


@pytest.mark.parametrize("method", ["record_draw", "record_group", "begin_step", "finish_step"])
def test_a_kill_at_any_call_changes_no_step(method: str, tmp_path: Path) -> None:
    """Between two takes, and inside of one when some of its groups were already judged."""
    whole, _, _ = play(tmp_path / "whole", every_third, 3)
    count = {"record_draw": 33, "record_group": 33}.get(method, 3)
    for nth in range(1, count + 1, 4 if count > 3 else 1):
        folder = tmp_path / f"{method}-{nth}"
        with Journal.create(folder, HEADER) as journal:
            _die_after(journal, method, nth)
            with pytest.raises(Killed):
                asyncio.run(Rig(journal, every_third).steps(range(1, 4)))
        with Journal.open(folder) as journal:
            begun = [list(step.draw_ids) for step in journal.steps()]
            if len(journal.steps()) > journal.last_finished_step():
                journal.finish_step(StepResult(len(begun), len(begun), "w", {}))
            rig = Rig(journal, every_third)
            rest = asyncio.run(rig.steps(range(len(begun) + 1, 4)))
            assert begun + rest == whole, f"{method} {nth}"
            assert journal.ledger().balanced and journal.ledger().open == 0


def _die_after(journal: Journal, method: str, nth: int) -> None:
    original, calls = getattr(journal, method), 0

    def dying(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > nth:
            raise Killed
        original(*args)
        if calls == nth:
            raise Killed

    setattr(journal, method, dying)

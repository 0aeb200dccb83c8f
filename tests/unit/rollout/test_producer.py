"""Groups come in the order of their draws, none too old, none lost, none twice."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.data.tasks import make_task, user_prompt
from posttrain.errors import EngineError
from posttrain.rollout.producer import RolloutProducer
from posttrain.types import (
    Completion,
    Draw,
    FinishReason,
    Group,
    SamplingParams,
    Scored,
    StopReason,
    Task,
    TokenSequence,
    Trajectory,
    Turn,
)

VECTORS = Path(__file__).parents[2] / "numerics/vectors.json"
TASK = make_task("t", user_prompt(None, "q"), {}, grader="none")


def group_of(draw: Draw, version: int) -> Group:
    completion = Completion.build([2], [-0.1], [version], FinishReason.EOS, "")
    row = TokenSequence.build([1, 2], [2, 0], [0, -0.1], [-1, version])
    turn = Turn(np.array([1], np.int32), completion)
    member = Trajectory(draw.draw_id, 0, 0, (turn,), (row,), Scored(1.0), StopReason.TERMINATED)
    return Group(draw, (member,))


class FakeRunner:
    """Groups that take a random number of turns of the event loop, sampled at `version`."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.version = 0
        self.ran: list[int] = []
        self.extras: dict[int, Set[str]] = {}
        self.finished: list[int] = []
        self.fails_on: int | None = None
        self.gate: asyncio.Event | None = None

    async def group(
        self, task: Task, draw: Draw, group_size: int, params: Any, extras: Set[str]
    ) -> Group:
        self.ran.append(draw.draw_id)
        self.extras[draw.draw_id] = extras
        version = self.version
        for _ in range(self._random.randrange(30)):
            await asyncio.sleep(0)
        if self.gate is not None:
            await self.gate.wait()
        if draw.draw_id == self.fails_on:
            raise RuntimeError("runner broke")
        self.finished.append(draw.draw_id)
        return group_of(draw, version)


class FakeCurriculum:
    def __init__(self) -> None:
        self.observed: list[int] = []

    def draw(self, draw_id: int) -> Draw:
        return Draw(draw_id, f"t{draw_id}", 0, draw_id, environment="ab"[draw_id % 2])

    def task(self, draw: Draw) -> Task:
        return TASK

    def observe(self, group: Group) -> None:
        self.observed.append(group.draw.draw_id)


class FakeJournal:
    def __init__(self) -> None:
        self.draws: list[int] = []
        self.groups: list[int] = []
        self.dropped: dict[int, str] = {}

    def record_draw(self, draw: Draw) -> None:
        self.draws.append(draw.draw_id)

    def record_group(self, group: Group) -> None:
        self.groups.append(group.draw.draw_id)

    def drop_draw(self, draw_id: int, reason: str) -> None:
        self.dropped[draw_id] = reason


class Rig:
    """A producer and the fakes around it."""

    def __init__(self, seed: int = 0, **fields: Any) -> None:
        self.runner = FakeRunner(seed)
        self.curriculum = FakeCurriculum()
        self.journal = FakeJournal()
        sizes = {"groups_per_step": 4, "group_size": 2, "max_policy_lag": 0, "num_steps": 10}
        self.producer = RolloutProducer(
            self.runner,  # type: ignore[arg-type]
            self.curriculum,
            self.journal,  # type: ignore[arg-type]
            SamplingParams(4),
            **(sizes | fields),  # type: ignore[arg-type]
        )

    async def take(self, version: int) -> list[int]:
        return [g.draw.draw_id for g in await self.producer.take(version)]

    async def take_all(self, num_steps: int) -> list[list[int]]:
        """Steps in a row, each of the policy that the one before left."""
        taken = []
        for version in range(num_steps):
            self.runner.version = version
            taken.append(await self.take(version))
        return taken


def run(scenario: Callable[[], Any]) -> Any:
    return asyncio.run(asyncio.wait_for(scenario(), timeout=30))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("lag", [0, 1, 3])
def test_groups_are_handed_out_in_the_order_of_their_draws(seed: int, lag: int) -> None:
    """Finish times are random; short answers get no head start; each draw is taken once."""
    rig = Rig(seed, max_policy_lag=lag)

    async def scenario() -> list[int]:
        taken: list[int] = []
        for version in range(10):
            rig.runner.version = version
            taken += await rig.take(version)
        return taken

    assert run(scenario) == list(range(40))
    assert rig.journal.draws == list(range(40)) and sorted(rig.journal.groups) == list(range(40))
    if lag:
        assert rig.runner.finished != list(range(40)), "they did finish in another order"


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_no_more_is_in_flight_than_the_bound_allows(lag: int) -> None:
    """e15: (lag + version + 1) x groups, so lag 0 makes progress and lag n runs n steps ahead."""
    rig = Rig(max_policy_lag=lag)

    async def scenario() -> None:
        for version in range(10):
            rig.runner.version = version
            await rig.take(version)
            assert len(rig.journal.draws) == min(4 * (version + lag + 1), 40)

    run(scenario)


def test_the_bound_is_the_published_capacity() -> None:
    """The vector staleness_capacity: (eta + version + 1) batch - accepted - running
    (arXiv:2505.24298 eq. 3). Draws that are done or in flight are those numbered so far."""
    vectors = json.loads(VECTORS.read_text(encoding="utf-8"))["vectors"]
    (case,) = (v for v in vectors if v["name"] == "staleness_capacity")
    given, expected = case["inputs"], case["expected"]
    submitted = given["accepted"] + given["running"]
    rig = Rig(
        max_policy_lag=given["eta"],
        groups_per_step=given["batch"],
        num_steps=1000,
        next_draw_id=submitted,
    )

    async def scenario() -> None:
        rig.producer.submit(given["version"])
        await rig.producer.close()

    run(scenario)
    capacity = expected["capacity"]
    assert rig.journal.draws == list(range(submitted, submitted + capacity))
    assert (capacity > 0) == expected["paper_admit_next"]


def test_extra_members_are_asked_for_by_the_environment_of_the_draw() -> None:
    rig = Rig(extras=lambda environment: {"greedy"} if environment == "b" else set())
    run(lambda: rig.take(0))
    assert rig.runner.extras == {0: set(), 1: {"greedy"}, 2: set(), 3: {"greedy"}}


def test_with_refill_a_step_is_drawn_until_enough_of_it_teaches() -> None:
    """Dynamic sampling: every third group teaches; the step takes those between as well."""
    rig = Rig(teaches=lambda group: group.draw.draw_id % 3 == 2, max_refill=3.0, num_steps=2)

    assert run(lambda: rig.take_all(2)) == [list(range(12)), list(range(12, 24))]
    assert rig.journal.draws == list(range(24)), "nothing is drawn that no step takes"
    assert rig.journal.dropped == {}, "the batch says why a group does not train"


def test_refill_ends_at_its_limit_and_the_next_step_is_as_long_as_ever() -> None:
    rig = Rig(teaches=lambda group: group.draw.draw_id >= 8, max_refill=2.0, num_steps=2)

    assert run(lambda: rig.take_all(2)) == [list(range(8)), list(range(8, 12))]
    assert rig.journal.draws == list(range(12))


@pytest.mark.parametrize("lag", [0, 2])
def test_refill_leaves_the_bound_on_lag_as_it_is(lag: int) -> None:
    rig = Rig(
        max_policy_lag=lag,
        teaches=lambda group: group.draw.draw_id % 3 != 0,
        max_refill=1.5,
        num_steps=6,
    )

    async def scenario() -> list[int]:
        lags = []
        for version in range(6):
            rig.runner.version = version
            taken = await rig.producer.take(version)
            assert 4 <= len(taken) <= 6
            lags += [version - g.min_policy_version for g in taken]
        return lags

    assert max(run(scenario)) <= lag and not rig.journal.dropped


def test_a_groups_lag_when_it_is_taken_never_exceeds_the_bound() -> None:
    rig = Rig(max_policy_lag=2)

    async def scenario() -> list[int]:
        lags = []
        for version in range(10):
            rig.runner.version = version
            groups = await rig.producer.take(version)
            lags += [version - g.min_policy_version for g in groups]
        return lags

    lags = run(scenario)
    assert max(lags) == 2 and not rig.journal.dropped


def test_surplus_groups_are_kept_for_the_next_step() -> None:
    """e03: 10 groups ready, 4 a step: 4, 4, 2 and nothing made anew."""
    rig = Rig(
        num_steps=0,
        next_draw_id=10,
        open_draws=[
            (Draw(i, f"t{i}", 0, i), group_of(Draw(i, f"t{i}", 0, i), 0)) for i in range(10)
        ],
    )

    async def scenario() -> list[list[int]]:
        first, second = await rig.take(0), await rig.take(0)
        return [first, second, sorted(rig.producer._pending)]

    assert run(scenario) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert rig.runner.ran == []


def test_a_group_that_aged_out_is_dropped_whole_with_its_reason_and_replaced() -> None:
    rig = Rig(max_policy_lag=1, num_steps=3)

    async def scenario() -> list[int]:
        await rig.take(0)  # draws 4..7 are made at version 0 as well
        rig.runner.version = 2
        return await rig.take(2)

    assert run(scenario) == [8, 9, 10, 11]
    assert rig.journal.dropped == dict.fromkeys(range(4, 8), "stale")


def test_dropped_draws_never_leave_the_last_step_short() -> None:
    """e01: beyond the planned draws, one is made for each that was dropped."""
    rig = Rig(max_policy_lag=1, num_steps=2)

    async def scenario() -> list[int]:
        await rig.take(0)
        rig.runner.version = 2
        return await rig.take(2)

    assert run(scenario) == [8, 9, 10, 11]


def test_a_sampler_that_never_gets_new_weights_is_an_error_not_an_endless_loop() -> None:
    for lag in (0, 1):
        rig = Rig(max_policy_lag=lag, num_steps=50)

        async def scenario(rig: Rig = rig, lag: int = lag) -> None:
            for version in range(lag + 1):
                await rig.take(version)
            with pytest.raises(EngineError, match="did not load the learner's weights"):
                await rig.take(lag + 1)
            await rig.producer.close()

        run(scenario)


def test_a_failure_of_the_runner_surfaces_in_take() -> None:
    rig = Rig()
    rig.runner.fails_on = 2

    async def scenario() -> None:
        with pytest.raises(RuntimeError, match="runner broke"):
            await rig.take(0)
        await rig.producer.close()

    run(scenario)
    assert 2 not in rig.journal.groups


def test_a_failure_of_the_journal_surfaces_in_take() -> None:
    rig = Rig()

    def full(group: Group) -> None:
        raise OSError("no space left")

    rig.journal.record_group = full  # type: ignore[method-assign]

    async def scenario() -> None:
        with pytest.raises(OSError, match="no space left"):
            await rig.take(0)
        await rig.producer.close()

    run(scenario)
    assert rig.curriculum.observed == [], "nothing is observed that the journal does not hold"


def test_close_leaves_draws_open_and_a_resume_makes_exactly_those_again() -> None:
    """f02: a finished group isn't generated again; an unfinished one is; none is skipped."""
    before = Rig(max_policy_lag=1)

    async def first_life() -> list[int]:
        taken = await before.take(0)
        before.runner.gate = asyncio.Event()
        await asyncio.sleep(0)
        await before.producer.close()
        return taken

    trained = run(first_life)
    assert before.journal.dropped == {} and before.producer.num_in_flight == 0
    still_open = [i for i in before.journal.draws if i not in trained]
    finished = [i for i in still_open if i in before.journal.groups]
    unfinished = [i for i in still_open if i not in finished]
    draws = {i: Draw(i, f"t{i}", 0, i) for i in still_open}
    after = Rig(
        max_policy_lag=1,
        next_draw_id=len(before.journal.draws),
        open_draws=[(d, group_of(d, 0) if i in finished else None) for i, d in draws.items()],
    )
    after.runner.version = 1

    async def second_life() -> list[int]:
        taken = await after.take(1)
        await after.producer.close()
        return taken

    assert trained + run(second_life) == list(range(8))
    assert set(after.runner.ran) & set(finished) == set()
    assert set(unfinished) <= set(after.runner.ran)
    assert set(after.journal.draws) & set(still_open) == set(), "a draw is recorded once"


def test_in_flight_is_counted_while_it_flies() -> None:
    rig = Rig()

    async def scenario() -> tuple[int, int]:
        rig.producer.submit(0)
        await asyncio.sleep(0)
        flying = rig.producer.num_in_flight
        await rig.take(0)
        return flying, rig.producer.num_in_flight

    assert run(scenario) == (4, 0)


def test_a_long_run_remembers_nothing_of_draws_that_are_done() -> None:
    rig = Rig(num_steps=50)

    async def scenario() -> None:
        for version in range(50):
            rig.runner.version = version
            await rig.take(version)

    run(scenario)
    assert not rig.producer._pending and not rig.producer._submitted_at

"""Deadlines of actions that wait, and none for those that do not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from posttrain.rollout.deadline import Budget, OutOfTimeError, within

FOREVER = 3600.0


async def after_turns(turns: int) -> int:
    for _ in range(turns):
        await asyncio.sleep(0)
    return turns


async def hang() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_what_ends_in_time_gives_its_value_however_often_it_waits(turns: int) -> None:
    assert asyncio.run(within(FOREVER, after_turns(turns))) == turns


def test_what_does_not_wait_is_not_on_the_clock() -> None:
    assert asyncio.run(within(-1.0, after_turns(0))) == 0


def test_what_waits_too_long_is_stopped_where_it_waits() -> None:
    stopped: list[str] = []

    async def tidy() -> None:
        try:
            await hang()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            stopped.append("tidied up")
            raise

    with pytest.raises(OutOfTimeError):
        asyncio.run(within(0.0, tidy()))
    assert stopped == ["tidied up"]


@pytest.mark.parametrize("turns", [0, 2])
def test_a_timeout_of_its_own_passes_through(turns: int) -> None:
    async def own() -> None:
        await after_turns(turns)
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        asyncio.run(within(FOREVER, own()))


def test_an_inner_deadline_ends_before_an_outer_one_and_is_told_apart() -> None:
    async def inner() -> str:
        try:
            await within(0.0, hang())
        except OutOfTimeError:
            return "inner"
        return "none"

    assert asyncio.run(within(FOREVER, inner())) == "inner"


@pytest.mark.parametrize("awaited", ["future", "task"])
def test_futures_and_tasks_are_awaited_as_coroutines_are(awaited: str) -> None:
    async def run() -> int:
        loop = asyncio.get_running_loop()
        if awaited == "task":
            return await within(FOREVER, asyncio.create_task(after_turns(2)))
        future: asyncio.Future[int] = loop.create_future()
        loop.call_soon(future.set_result, 2)
        return await within(FOREVER, future)

    assert asyncio.run(run()) == 2


def test_cancelling_the_owner_reaches_the_action() -> None:
    seen: list[str] = []

    async def action() -> None:
        try:
            await hang()
        finally:
            seen.append("ended")

    async def run() -> None:
        task = asyncio.create_task(within(FOREVER, action()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert seen == ["ended"]


@pytest.mark.parametrize("action", [lambda: after_turns(0), lambda: after_turns(1)])
def test_actions_share_a_budget(
    action: Callable[[], Awaitable[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them takes a second of a clock that the test turns."""
    now = iter(range(100))
    monkeypatch.setattr("posttrain.rollout.deadline.monotonic", lambda: next(now))
    lefts: list[float] = []

    async def measured(seconds: float, action: Awaitable[int]) -> int:
        lefts.append(seconds)
        return await action

    monkeypatch.setattr("posttrain.rollout.deadline.within", measured)

    async def run() -> None:
        budget = Budget(5.0)
        for _ in range(3):
            await budget.spend(action())

    asyncio.run(run())
    assert lefts == [5.0, 4.0, 3.0]

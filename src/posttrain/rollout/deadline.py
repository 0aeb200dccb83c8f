"""Seconds that something may take, without a timer for what does not wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Generator
from time import monotonic
from typing import Any, TypeVar

T = TypeVar("T")


class OutOfTimeError(Exception):
    """The seconds are used up."""


async def within(seconds: float, action: Awaitable[T]) -> T:
    """What `action` gives. Raises OutOfTimeError when it waits longer than `seconds`; a
    TimeoutError of its own passes through.

    Most environments and graders compute without waiting. They never let the event loop run, so no
    timer could stop them, and none is made: the action's first step is taken at once, and the
    clock is set only when it asks to wait.
    """
    steps = action.__await__()
    try:
        awaited = next(steps)
    except StopIteration as done:
        return done.value
    clock = asyncio.timeout(max(seconds, 0.0))
    try:
        async with clock:
            return await _Begun(steps, awaited)
    except TimeoutError:
        if clock.expired():
            raise OutOfTimeError from None
        raise


class Budget:
    """Seconds that several actions may take together."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds

    async def spend(self, action: Awaitable[T]) -> T:
        """`within` what is left, which is less by what the action took."""
        started = monotonic()
        try:
            return await within(self._left, action)
        finally:
            self._left -= monotonic() - started


class _Begun:
    """An awaitable whose first step was taken: `awaited` is what it waits for."""

    def __init__(self, steps: Any, awaited: Any) -> None:
        self._steps = steps
        self._awaited = awaited

    def __await__(self) -> Generator[Any, Any, Any]:
        """`yield from` for a generator that is under way: what is thrown here reaches it."""
        steps, awaited = self._steps, self._awaited
        while True:
            thrown: BaseException | None = None
            try:
                yield awaited
            except BaseException as error:  # boundary: passed on to what is waiting
                if not hasattr(steps, "throw"):
                    raise
                thrown = error
            try:
                awaited = next(steps) if thrown is None else steps.throw(thrown)
            except StopIteration as done:
                return done.value

"""Keeps enough groups in flight and hands them out in the order they were drawn.

    take()      consumes finished groups; waits for the oldest draws; unblocked by `_roll`
    _roll()     consumes a draw; produces a journalled group; a failure surfaces in `take`

The bound: a draw is submitted only while

    submitted - lost < (policy_version + max_policy_lag + 1) * groups_per_step

so a group submitted at version v trains at step s with s - 1 - v <= max_policy_lag (the proof is in
docs/staleness.md); `take` checks it again where the group is consumed. Handing out by submission
order keeps short answers from being favoured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Set
from typing import NoReturn

from posttrain.errors import EngineError
from posttrain.protocols import Curriculum, DrawJournal
from posttrain.rollout.episode import EpisodeRunner
from posttrain.telemetry.spans import span
from posttrain.types import Draw, Group, SamplingParams

JOURNAL = "journal"
"""The track of what is recorded while rollouts go on."""


class RolloutProducer:
    """Draws tasks, runs their groups, journals them, and delivers them."""

    def __init__(
        self,
        runner: EpisodeRunner,
        curriculum: Curriculum,
        journal: DrawJournal,
        params: SamplingParams,
        *,
        groups_per_step: int,
        group_size: int,
        max_policy_lag: int,
        num_steps: int,
        extras: Callable[[str], Set[str]] = lambda environment: frozenset(),
        teaches: Callable[[Group], bool] | None = None,
        max_refill: float = 1.0,
        next_draw_id: int = 0,
        num_lost: int = 0,
        open_draws: Iterable[tuple[Draw, Group | None]] = (),
    ) -> None:
        """`num_lost` counts draws that were dropped before a step consumed them; `open_draws` are
        those that a former process left open, with the group if it was finished.

        With `teaches`, groups for which it is False do not count towards `groups_per_step`, until
        `max_refill` times as many are taken."""
        self._runner = runner
        self._curriculum = curriculum
        self._journal = journal
        self._params = params
        self._groups_per_step = groups_per_step
        self._group_size = group_size
        self._max_policy_lag = max_policy_lag
        self._num_steps = num_steps
        self._extras = extras
        self._teaches = teaches
        self._max_taken = int(max_refill * groups_per_step)
        self._num_lost = num_lost
        self._next_draw_id = next_draw_id
        self._left_open = list(open_draws)
        self._pending: dict[int, asyncio.Task[Group]] = {}
        self._submitted_at: dict[int, int] = {}
        self.num_in_flight = 0

    async def take(self, policy_version: int) -> list[Group]:
        """The next `groups_per_step` groups in draw order, none older than the bound allows.

        A group that aged out is dropped as a whole and journalled with its reason, and the next
        one takes its place.
        """
        taken: list[Group] = []
        num_teaching = 0
        while num_teaching < self._groups_per_step and (
            self._teaches is None or len(taken) < self._max_taken
        ):
            self.submit(policy_version)
            draw_id = min(self._pending)
            group = await self._pending[draw_id]
            del self._pending[draw_id]
            submitted_at = self._submitted_at.pop(draw_id, None)
            oldest = group.min_policy_version
            if oldest >= 0 and policy_version - oldest > self._max_policy_lag:
                if submitted_at == policy_version:
                    self._refuse_old_sampler(draw_id, oldest, policy_version)
                self._journal.drop_draw(draw_id, "stale")
                self._num_lost += 1
                continue
            taken.append(group)
            if self._teaches is None or self._teaches(group):
                num_teaching += 1
            elif len(taken) - num_teaching <= self._max_taken - self._groups_per_step:
                self._num_lost += 1  # the step consumes it, and another takes its place
        return taken

    def submit(self, policy_version: int) -> None:
        """Start draws up to the bound. A draw that no step consumed makes room for another."""
        for draw, group in self._left_open:
            self._pending[draw.draw_id] = asyncio.create_task(self._roll(draw, group))
            if group is None:
                self._submitted_at[draw.draw_id] = policy_version
        self._left_open.clear()
        steps_ahead = min(policy_version + self._max_policy_lag + 1, self._num_steps)
        while self._next_draw_id - self._num_lost < steps_ahead * self._groups_per_step:
            draw = self._curriculum.draw(self._next_draw_id)
            self._next_draw_id += 1
            with span("draw", JOURNAL, draw=draw.draw_id):
                self._journal.record_draw(draw)
            self._submitted_at[draw.draw_id] = policy_version
            self._pending[draw.draw_id] = asyncio.create_task(self._roll(draw, None))

    def _refuse_old_sampler(self, draw_id: int, oldest: int, policy_version: int) -> NoReturn:
        """A group that was stale when it was made means that the sampler has old weights: dropping
        it and drawing again would never end."""
        raise EngineError(
            f"draw {draw_id}: submitted at policy version {policy_version} but sampled by "
            f"version {oldest}; the sampler did not load the learner's weights"
        )

    async def close(self) -> None:
        """Stop what is in flight. Its draws stay open in the journal and are redone on resume."""
        for task in self._pending.values():
            task.cancel()
        await asyncio.gather(*self._pending.values(), return_exceptions=True)
        self._pending.clear()

    async def _roll(self, draw: Draw, group: Group | None) -> Group:
        if group is not None:
            return group
        self.num_in_flight += 1
        try:
            task = self._curriculum.task(draw)
            extras = self._extras(draw.environment)
            group = await self._runner.group(task, draw, self._group_size, self._params, extras)
        finally:
            self.num_in_flight -= 1
        with span("group", JOURNAL, draw=draw.draw_id):
            self._journal.record_group(group)
        self._curriculum.observe(group)
        return group

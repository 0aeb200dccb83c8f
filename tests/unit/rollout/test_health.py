"""A batch that is mostly failures stops the run instead of training on what is left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from posttrain.errors import RolloutError
from posttrain.rollout.health import refuse_sick_batch
from posttrain.types import (
    Draw,
    Group,
    Invalid,
    InvalidKind,
    Scored,
    StopReason,
    TrainBatch,
    Trajectory,
    Turn,
)

BATCH = TrainBatch(7, (), ())


@pytest.fixture
def groups(make: SimpleNamespace) -> Any:
    """One group a string: 'r' reward error, 't' environment timeout, '.' scored."""
    verdicts = {
        "r": Invalid(InvalidKind.REWARD_ERROR, "boom"),
        "t": Invalid(InvalidKind.ENV_TIMEOUT, "slow"),
        ".": Scored(0.0),
    }

    def build(*members: str) -> list[Group]:
        completion = make.completion([2])
        turn, row = Turn(np.array([1], np.int32), completion), make.sequence([1], completion)
        return [
            Group(
                Draw(d, "t", 0, 0),
                tuple(
                    Trajectory(d, i, 0, (turn,), (row,), verdicts[v], StopReason.TERMINATED)
                    for i, v in enumerate(kinds)
                ),
            )
            for d, kinds in enumerate(members)
        ]

    return build


class Drops:
    def __init__(self) -> None:
        self.dropped: dict[int, str] = {}

    def drop_draw(self, draw_id: int, reason: str) -> None:
        self.dropped[draw_id] = reason


def test_a_share_at_the_limit_passes_and_one_more_stops_the_run(groups: Any) -> None:
    journal: Any = Drops()
    refuse_sick_batch(groups("rt..", "...."), BATCH, journal, 0.25)
    assert journal.dropped == {}
    with pytest.raises(RolloutError, match="step 7: 3 of 8 episodes have no reward, 2 of them"):
        refuse_sick_batch(groups("rtt.", "...."), BATCH, journal, 0.25)


def test_the_commonest_failure_is_named_and_the_draws_are_dropped_first(groups: Any) -> None:
    journal: Any = Drops()
    with pytest.raises(RolloutError, match="3 of them env_timeout: slow.*not trained as 0"):
        refuse_sick_batch(groups("rtt", "rt."), BATCH, journal, 0.5)
    assert journal.dropped == {0: "invalid", 1: "invalid"}


def test_a_limit_of_one_never_stops_and_a_limit_of_zero_always_does(groups: Any) -> None:
    journal: Any = Drops()
    refuse_sick_batch(groups("rrr"), BATCH, journal, 1.0)
    refuse_sick_batch([], BATCH, journal, 0.0)
    with pytest.raises(RolloutError):
        refuse_sick_batch(groups("r.."), BATCH, journal, 0.0)

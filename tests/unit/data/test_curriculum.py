from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.curriculum import UniformCurriculum
from posttrain.data.tasks import TaskList, make_task, user_prompt
from posttrain.errors import DataError
from posttrain.types import Task


def tasks(size: int, prefix: str = "t") -> TaskList:
    return TaskList(
        make_task(f"{prefix}{i}", user_prompt(None, f"question {i}"), {}, grader="none")
        for i in range(size)
    )


@given(size=st.integers(1, 40), seed=st.integers(0, 2**31), epoch=st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_every_task_is_drawn_exactly_once_an_epoch(size: int, seed: int, epoch: int) -> None:
    """f02"""
    curriculum = UniformCurriculum(tasks(size), seed)
    draws = [curriculum.draw(i) for i in range(epoch * size, (epoch + 1) * size)]
    assert {d.epoch for d in draws} == {epoch}
    assert Counter(d.task_id for d in draws) == Counter(f"t{i}" for i in range(size))


@pytest.mark.parametrize("killed_at", [0, 1, 7, 8, 9, 15, 16])
def test_resume_continues_the_uninterrupted_order_across_epochs(killed_at: int) -> None:
    """f01: 8 draws an epoch, 2 epochs, a kill anywhere, the epoch boundary included."""
    whole = [UniformCurriculum(tasks(8), seed=3).draw(i) for i in range(16)]
    before = UniformCurriculum(tasks(8), seed=3)
    head = [before.draw(i) for i in range(killed_at)]
    after = UniformCurriculum(tasks(8), seed=3)
    assert head + [after.draw(i) for i in range(killed_at, 16)] == whole


def test_draws_in_any_order_repeated_or_skipped_give_the_same_tasks() -> None:
    """f02: in-flight draws are asked for again after a kill; nothing is skipped or repeated."""
    curriculum = UniformCurriculum(tasks(20), seed=1)
    in_order = {i: curriculum.draw(i) for i in range(20)}
    scrambled = UniformCurriculum(tasks(20), seed=1)
    for i in (13, 2, 2, 19, 0, 7, 13):
        assert scrambled.draw(i) == in_order[i]
        assert scrambled.task(in_order[i]).task_id == in_order[i].task_id


def test_a_small_set_never_runs_dry() -> None:
    """e01: 5 prompts, 4 a step, 10 steps."""
    curriculum = UniformCurriculum(tasks(5), seed=0)
    counts = Counter(curriculum.draw(i).task_id for i in range(40))
    assert set(counts.values()) == {8}


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def order(seed: int, epoch: int) -> tuple[str, ...]:
        curriculum = UniformCurriculum(tasks(12), seed)
        return tuple(curriculum.draw(epoch * 12 + i).task_id for i in range(12))

    orders = {order(seed, epoch) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_every_draw_has_a_seed_of_its_own() -> None:
    curriculum = UniformCurriculum(tasks(3), seed=0)
    assert len({curriculum.draw(i).seed for i in range(30)}) == 30


def test_a_task_set_that_changed_under_a_draw_is_an_error() -> None:
    draw = UniformCurriculum(tasks(8), seed=0).draw(3)
    with pytest.raises(DataError, match=r"draw 3 .*changed"):
        UniformCurriculum(tasks(8, prefix="other"), seed=0).task(draw)


def test_no_task_at_all_is_an_error() -> None:
    with pytest.raises(DataError, match="0 tasks"):
        UniformCurriculum(tasks(0), seed=0)


class Counting:
    """A task set that makes tasks when asked and counts how often."""

    def __init__(self, size: int) -> None:
        self.size, self.made = size, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Task:
        self.made += 1
        return make_task(f"n{index}", user_prompt(None, str(index)), {}, grader="none")


def test_a_huge_lazy_set_is_not_enumerated() -> None:
    lazy = Counting(10**9)
    curriculum = UniformCurriculum(lazy, seed=0)
    assert len({curriculum.draw(i).task_id for i in range(50)}) == 50
    assert lazy.made == 50

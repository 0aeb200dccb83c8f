"""Several task sets in one run: exact shares, every task once an epoch, every member in view."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.curriculum import UniformCurriculum
from posttrain.data.mixture import MixtureCurriculum, MixtureTasks, curriculum_of
from posttrain.data.tasks import TaskList, make_task, user_prompt
from posttrain.errors import DataError
from posttrain.rollout.prompts import fit_prompts


def tasks(name: str, count: int) -> TaskList:
    return TaskList(
        make_task(f"{name}{i}", user_prompt(None, f"{name} {i}"), {}, grader="none")
        for i in range(count)
    )


def mixture(sizes: dict[str, int], weights: dict[str, int] | None = None) -> MixtureTasks:
    return MixtureTasks({name: tasks(name, size) for name, size in sizes.items()}, weights or {})


some_mixtures = st.dictionaries(
    st.sampled_from(["a", "b", "c", "d"]),
    st.tuples(st.integers(1, 7), st.integers(1, 5)),
    min_size=1,
)


@settings(deadline=None, max_examples=50)
@given(some_mixtures, st.integers(0, 2**32))
def test_each_round_honours_the_weights_exactly(
    members: dict[str, tuple[int, int]], seed: int
) -> None:
    weights = {name: weight for name, (_, weight) in members.items()}
    sizes = {name: size for name, (size, _) in members.items()}
    curriculum = MixtureCurriculum(mixture(sizes, weights), seed)
    length = sum(weights.values())
    for begun in (0, 1, 5):
        drawn = [curriculum.draw(begun * length + i).environment for i in range(length)]
        assert Counter(drawn) == Counter(weights)


@settings(deadline=None, max_examples=50)
@given(some_mixtures, st.integers(0, 2**32))
def test_every_task_comes_once_an_epoch_of_its_member(
    members: dict[str, tuple[int, int]], seed: int
) -> None:
    weights = {name: weight for name, (_, weight) in members.items()}
    sizes = {name: size for name, (size, _) in members.items()}
    curriculum = MixtureCurriculum(mixture(sizes, weights), seed)
    seen: dict[tuple[str, int], list[str]] = defaultdict(list)
    for draw_id in range(120):
        draw = curriculum.draw(draw_id)
        seen[draw.environment, draw.epoch].append(draw.task_id)
    for (name, epoch), drawn in seen.items():
        assert len(set(drawn)) == len(drawn)
        if (name, epoch + 1) in seen:
            assert sorted(drawn) == sorted(f"{name}/{name}{i}" for i in range(sizes[name]))


def test_a_draw_is_a_pure_function_of_its_number() -> None:
    sizes, weights = {"a": 5, "b": 3}, {"a": 2}
    curriculum = MixtureCurriculum(mixture(sizes, weights), 7)
    forward = [curriculum.draw(i) for i in range(60)]
    fresh = MixtureCurriculum(mixture(sizes, weights), 7)
    assert [fresh.draw(i) for i in reversed(range(60))] == forward[::-1]
    other = MixtureCurriculum(mixture(sizes, weights), 8)
    assert [other.draw(i) for i in range(60)] != forward
    assert len({draw.seed for draw in forward}) == 60


def test_a_draw_names_its_member_and_gets_its_task_back() -> None:
    curriculum = MixtureCurriculum(mixture({"a": 5, "b": 3}, {"b": 3}), 7)
    for draw_id in range(40):
        draw = curriculum.draw(draw_id)
        task = curriculum.task(draw)
        assert draw.draw_id == draw_id and task.task_id == draw.task_id
        assert draw.task_id.startswith(f"{draw.environment}/{draw.environment}")
        assert task.prompt[0].plain_text().startswith(f"{draw.environment} ")


def test_members_of_one_kind_are_drawn_in_orders_of_their_own() -> None:
    same = MixtureTasks({"x": tasks("t", 20), "y": tasks("t", 20)}, {})
    curriculum = MixtureCurriculum(same, 0)
    order = defaultdict(list)
    for draw_id in range(40):
        draw = curriculum.draw(draw_id)
        order[draw.environment].append(draw.task_id.partition("/")[2])
    assert sorted(order["x"]) == sorted(order["y"]) and order["x"] != order["y"]


def test_draws_of_a_member_are_spread_over_the_round() -> None:
    curriculum = MixtureCurriculum(mixture({"a": 9, "b": 9}, {"a": 4}), 0)
    assert "".join(curriculum.draw(i).environment for i in range(5)) == "aabaa"


def test_changed_tasks_are_noticed_by_a_resume() -> None:
    draw = MixtureCurriculum(mixture({"a": 5, "b": 3}), 7).draw(4)
    with pytest.raises(DataError, match=r"tasks or the seed changed"):
        for size in range(6, 12):  # some order differs
            MixtureCurriculum(mixture({"a": size, "b": size}), 7).task(draw)


def test_a_negative_draw_is_refused() -> None:
    with pytest.raises(ValueError, match=r"draw_id is -1"):
        MixtureCurriculum(mixture({"a": 1}), 0).draw(-1)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_every_task_has_one_place_and_a_beginning_holds_every_member(counts: list[int]) -> None:
    sizes = dict(zip("abcd", counts, strict=False))
    whole = mixture(sizes)
    ids = [whole[i].task_id for i in range(len(whole))]
    assert sorted(ids) == sorted(f"{n}/{n}{i}" for n, count in sizes.items() for i in range(count))
    for length in range(len(sizes), len(ids) + 1):
        held = Counter(task_id.partition("/")[0] for task_id in ids[:length])
        assert held.keys() == sizes.keys()
        most = max(held.values())
        assert all(n == sizes[name] or n >= most - 1 for name, n in held.items())


@pytest.mark.parametrize("index", [-1, 5])
def test_an_index_outside_is_refused(index: int) -> None:
    with pytest.raises(IndexError, match=r"outside a set of 5"):
        mixture({"a": 2, "b": 3})[index]


def test_a_mixture_is_drawn_as_one_and_a_plain_set_is_not() -> None:
    assert isinstance(curriculum_of(mixture({"a": 2}), 0), MixtureCurriculum)
    assert isinstance(curriculum_of(tasks("a", 2), 0), UniformCurriculum)


class Lengths:
    """A renderer that says how long the prompts are: as many tokens as the number in them."""

    def prompt_ids(self, prompt: Any) -> range:
        return range(int(prompt[0].plain_text().split()[1]))


def test_dropping_long_prompts_leaves_a_mixture_with_its_names_and_weights() -> None:
    """Dropped as one set it would become a plain one, and every draw would lose its member."""
    whole = mixture({"a": 6, "b": 3}, {"a": 2})
    fitted = fit_prompts(whole, Lengths(), 3, "drop", "training tasks")  # type: ignore[arg-type]
    assert isinstance(fitted, MixtureTasks) and fitted.weights == {"a": 2, "b": 1}
    assert {n: len(own) for n, own in fitted.members.items()} == {"a": 4, "b": 3}
    drawn = [curriculum_of(fitted, 0).draw(i) for i in range(12)]
    assert {d.environment for d in drawn} == {"a", "b"}
    assert "a/a5" not in {d.task_id for d in drawn}


def test_a_long_prompt_is_refused_with_its_member() -> None:
    with pytest.raises(DataError, match=r"training tasks of a: 2 of 6 prompts exceed 3"):
        fit_prompts(mixture({"a": 6, "b": 3}), Lengths(), 3, "error", "training tasks")  # type: ignore[arg-type]

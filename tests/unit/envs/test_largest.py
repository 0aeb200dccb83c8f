from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.config import LargestConfig
from posttrain.envs import build_env_spec
from posttrain.envs.largest import LargestSpec, grade
from posttrain.errors import ConfigError, DataError

SMALL = LargestConfig(count=3, min_number=10, max_number=40, num_train=400, num_eval=30)


def sets_of(tasks: object) -> set[tuple[int, ...]]:
    return {
        tuple(sorted(tasks[i].hidden.reveal()["numbers"]))  # type: ignore[index]
        for i in range(len(tasks))  # type: ignore[arg-type]
    }


def test_no_held_out_set_is_trained_in_any_order() -> None:
    """k11: the split is by the set of numbers, so a permutation cannot leak."""
    spec = LargestSpec(SMALL)
    assert len(sets_of(spec.eval_tasks())) == 30
    assert not sets_of(spec.train_tasks()) & sets_of(spec.eval_tasks())


def test_every_number_is_in_range_and_the_answer_is_their_maximum() -> None:
    spec = LargestSpec(SMALL)
    for tasks in (spec.train_tasks(), spec.eval_tasks()):
        for i in range(len(tasks)):
            hidden = tasks[i].hidden.reveal()
            assert len(set(hidden["numbers"])) == 3
            assert all(10 <= n <= 40 for n in hidden["numbers"])
            assert hidden["answer"] == max(hidden["numbers"])
            assert ", ".join(map(str, hidden["numbers"])) in tasks[i].prompt[-1].plain_text()


@pytest.mark.parametrize(
    ("text", "value", "parsed"),
    [("{gold}", 1.0, True), (" {gold}.\n", 1.0, True), ("7", 0.0, True), ("{gold} or 7", 0, False)],
)
def test_only_the_number_alone_counts(text: str, value: float, parsed: bool) -> None:
    task = LargestSpec(SMALL).eval_tasks()[0]
    verdict = grade(task, text.format(gold=task.hidden.reveal()["answer"]))
    assert (verdict.value, verdict.parsed) == (value, parsed)


def test_repeating_the_question_earns_nothing() -> None:
    task = LargestSpec(SMALL).eval_tasks()[0]
    assert grade(task, task.prompt[-1].plain_text()).value == 0


def test_a_range_without_enough_sets_is_refused_with_the_number() -> None:
    with pytest.raises(DataError, match="num_eval = 500"):
        LargestSpec(LargestConfig(count=2, min_number=1, max_number=9, num_eval=500))


def test_a_range_whose_every_set_is_held_out_is_refused_and_not_searched_for_ever() -> None:
    """The three pairs of 167..169 all happen to be held out."""
    with pytest.raises(DataError, match=r"167\.\.169 gave no set to train on"):
        LargestSpec(LargestConfig(count=2, min_number=167, max_number=169, num_eval=1))


def test_a_prompt_without_the_numbers_is_refused() -> None:
    with pytest.raises(ConfigError, match="numbers"):
        build_env_spec(LargestConfig(prompt="Largest?"), seed=0, base_dir=Path())


def test_worked_examples_come_before_the_question() -> None:
    config = LargestConfig(num_eval=1, system="Be brief.", examples=(("Largest: 1, 2, 3", "3"),))
    task = LargestSpec(config).eval_tasks()[0]
    assert [m.role for m in task.prompt] == ["system", "user", "assistant", "user"]
    assert task.prompt[2].plain_text() == "3"

import sys

import pytest

from posttrain.config import ReverseConfig
from posttrain.envs.reverse import ReverseSpec, grade
from posttrain.errors import ConfigError, DataError


def texts(tasks) -> list[str]:
    return [tasks[i].prompt[0].plain_text() for i in range(len(tasks))]


def test_training_and_held_out_strings_are_all_strings_once() -> None:
    spec = ReverseSpec(ReverseConfig(alphabet="abc", length=4, num_eval=20))
    train, held_out = texts(spec.train_tasks()), texts(spec.eval_tasks())
    assert len(held_out) == 20
    assert len({*train, *held_out}) == len(train) + len(held_out) == 81


def test_the_default_recipe_section_works() -> None:
    spec = ReverseSpec(ReverseConfig())
    assert (len(spec.train_tasks()), len(spec.eval_tasks())) == (48, 16)


def test_strings_are_indexed_not_enumerated() -> None:
    spec = ReverseSpec(ReverseConfig(alphabet="abcdefgh", length=30))
    tasks = spec.train_tasks()
    assert len(tasks) == sys.maxsize  # as far as len() can count
    assert len(tasks[sys.maxsize - 1].prompt[0].plain_text()) == 30


def test_too_few_strings_say_the_numbers() -> None:
    with pytest.raises(DataError, match="make 8 strings, and num_eval 5 is more than half"):
        ReverseSpec(ReverseConfig(alphabet="ab", length=3, num_eval=5))


@pytest.mark.parametrize("alphabet", ["", "a", "aba", "a b"])
def test_an_alphabet_that_makes_no_different_strings_is_refused(alphabet: str) -> None:
    with pytest.raises(ConfigError, match=r"env\.alphabet"):
        ReverseSpec(ReverseConfig(alphabet=alphabet, length=8))


def task_of(text: str):
    spec = ReverseSpec(ReverseConfig(alphabet="abcd", length=4))
    every = [*range(len(spec.train_tasks()))]
    return next(
        spec.train_tasks()[i] for i in every if spec.train_tasks()[i].prompt[0].plain_text() == text
    )


@pytest.mark.parametrize(
    ("said", "value", "correct"),
    [
        ("dcba", 1.0, True),
        ("dcba\n", 1.0, True),
        ("dcbb", 0.75, False),
        ("dcb", 0.75, False),
        ("dcbadcba", 0.5, False),
        ("abcd", 0.0, False),
        ("", 0.0, False),
        ("d", 0.25, False),
        ("dcba" + "x" * 996, 4 / 1000, False),
    ],
)
def test_the_reward_is_the_share_of_right_places_and_length_counts(said, value, correct) -> None:
    verdict = grade(task_of("abcd"), said)
    assert (verdict.value, verdict.correct, verdict.parsed) == (value, correct, bool(said))

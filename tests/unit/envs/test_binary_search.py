import asyncio
from itertools import product

import numpy as np
import pytest

from posttrain.config import BinarySearchConfig
from posttrain.envs.binary_search import BinarySearchSpec
from posttrain.types import Completion, FinishReason, Scored, StepOutcome, Task, Turn


def turn(text: str) -> Turn:
    completion = Completion.build([2], [-0.1], [0], FinishReason.EOS, text)
    return Turn(np.array([1], np.int32), completion)


def secret_task(spec: BinarySearchSpec, secret: int) -> Task:
    tasks = spec.train_tasks()
    every = (tasks[i] for i in range(len(tasks)))
    return next(task for task in every if task.hidden.reveal()["secret"] == secret)


def play(config: BinarySearchConfig, secret: int, *guesses: str) -> list[StepOutcome]:
    spec = BinarySearchSpec(config)

    async def episode() -> list[StepOutcome]:
        env = spec.make(secret_task(spec, secret))
        await env.reset(0)
        outcomes = []
        for guess in guesses:
            outcomes.append(await env.step(turn(guess)))
            if outcomes[-1].terminated:
                break
        await env.close()
        return outcomes

    return asyncio.run(episode())


def said(outcome: StepOutcome) -> str:
    assert outcome.observation is not None
    return outcome.observation.messages[0].plain_text()


def verdict(outcomes: list[StepOutcome]) -> Scored:
    last = outcomes[-1].verdict
    assert isinstance(last, Scored)
    for standing in (outcome.verdict for outcome in outcomes[:-1]):
        assert isinstance(standing, Scored)
        assert not standing.correct  # a limit that ends the game now leaves it lost
    return last


def bisect(config: BinarySearchConfig, secret: int) -> Scored:
    spec = BinarySearchSpec(config)

    async def episode() -> Scored:
        env = spec.make(secret_task(spec, secret))
        await env.reset(0)
        low, high = config.low, config.high
        while True:
            guess = (low + high) // 2
            outcome = await env.step(turn(str(guess)))
            if outcome.terminated:
                assert isinstance(outcome.verdict, Scored)
                return outcome.verdict
            if said(outcome) in ("h", "The number is higher."):
                low = guess + 1
            else:
                high = guess - 1

    return asyncio.run(episode())


@pytest.mark.parametrize("terse", [True, False])
def test_bisection_always_wins_seven_numbers_in_three_guesses(terse: bool) -> None:
    """The optimum of 1..7 with three guesses is 1."""
    config = BinarySearchConfig(terse=terse)
    assert [bisect(config, secret).value for secret in range(1, 8)] == [1.0] * 7


def test_three_guesses_cannot_find_all_of_eight_numbers() -> None:
    """The optimum of 1..8 with three guesses is 7/8."""
    config = BinarySearchConfig(low=1, high=8, terse=True)
    assert sum(bisect(config, secret).value for secret in range(1, 9)) == 7


def test_the_best_play_without_feedback_finds_three_of_seven() -> None:
    config = BinarySearchConfig(terse=True)
    rates = []
    for plan in product("1357", repeat=3):
        wins = [verdict(play(config, secret, *plan)).value for secret in range(1, 8)]
        rates.append(sum(wins) / 7)
    assert max(rates) == pytest.approx(3 / 7)


def test_feedback_is_about_the_secret_seen_from_the_guess() -> None:
    spoken = play(BinarySearchConfig(max_guesses=9), 5, "3", "7", "what?", "I say 5.")
    assert [said(o) for o in spoken[:2]] == ["The number is higher.", "The number is lower."]
    assert "single whole number" in said(spoken[2])
    terse = play(BinarySearchConfig(max_guesses=9, terse=True), 5, "3", "7", "x", "5")
    assert [said(o) for o in terse[:3]] == ["h", "l", "?"]
    assert verdict(spoken).value == verdict(terse).value == 1.0


def test_an_unreadable_guess_costs_a_guess() -> None:
    outcomes = play(BinarySearchConfig(terse=True), 5, "x", "", "7", "5")
    assert len(outcomes) == 3
    assert (verdict(outcomes).value, verdict(outcomes).parsed) == (0.0, True)
    assert not verdict(play(BinarySearchConfig(terse=True), 5, "a", "b", "c")).parsed


@pytest.mark.parametrize(
    "text",
    [
        "5 or 4",
        "1 2 3 4 5 6 7",
        "5.5",
        "0x5",
        "x5",
        pytest.param("5" * 10**6, id="a million digits"),
        pytest.param("\u0665", id="a digit that int() reads"),
    ],
)
@pytest.mark.parametrize("terse", [True, False])
def test_several_numbers_or_odd_ones_are_no_guess(text: str, terse: bool) -> None:
    outcomes = play(BinarySearchConfig(max_guesses=1, terse=terse), 5, text)
    assert (verdict(outcomes).value, verdict(outcomes).parsed) == (0.0, False)


def test_a_sentence_with_one_number_is_a_guess_only_in_the_spoken_game() -> None:
    sentence = "My guess is 5."
    assert verdict(play(BinarySearchConfig(max_guesses=1), 5, sentence)).value == 1.0
    terse = BinarySearchConfig(max_guesses=1, terse=True)
    assert verdict(play(terse, 5, sentence)).value == 0.0


@pytest.mark.parametrize("terse", [True, False])
def test_the_prompt_and_public_data_are_the_same_for_every_secret(terse: bool) -> None:
    """The gold must not leak into what the policy sees."""
    tasks = BinarySearchSpec(BinarySearchConfig(terse=terse)).train_tasks()
    assert len({tasks[i].prompt for i in range(7)}) == 1
    assert all(not tasks[i].metadata for i in range(7))


def test_num_eval_caps_the_secrets_that_are_evaluated() -> None:
    capped = BinarySearchSpec(BinarySearchConfig(low=1, high=100, num_eval=10))
    assert len(capped.eval_tasks()) == 10
    assert len(capped.train_tasks()) == 100
    assert len(BinarySearchSpec(BinarySearchConfig(num_eval=200)).eval_tasks()) == 7

"""What the best plays of the guessing game reach, worked out by exhaustion."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest


@cache
def most_found(size: int, guesses: int) -> int:
    """Secrets of a range that some plan with feedback finds: the best first guess splits it."""
    if size <= 0 or guesses == 0:
        return 0
    return max(
        1 + most_found(below, guesses - 1) + most_found(size - 1 - below, guesses - 1)
        for below in range(size)
    )


def test_feedback_is_worth_what_the_vector_says(vector):
    case = vector("binary_search_optimum")
    guesses, expected = case["inputs"]["guesses"], case["expected"]
    for i, size in enumerate(case["inputs"]["n"]):
        # By symmetry over guesses, one secret stands for all in uniform play.
        plays = product(range(size), repeat=guesses)
        hits = sum(0 in play for play in plays)
        assert most_found(size, guesses) / size == pytest.approx(expected["with_feedback"][i])
        assert guesses / size == pytest.approx(expected["best_without_feedback"][i])
        assert hits / size**guesses == pytest.approx(expected["memoryless_uniform"][i])

"""Nearest names."""

from __future__ import annotations

import pytest

from posttrain.names import did_you_mean, nearest


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("answer", ["answers", "ANSWER"], "ANSWER"),  # the same but for case wins
        ("clip_hgih", ["clip_low", "clip_high"], "clip_high"),
        ("smollm2", ["tiny-char", "smollm2-135m-instruct"], "smollm2-135m-instruct"),
        ("smo", ["smollm2-135m-instruct"], None),
        ("prompt", [], None),
    ],
)
def test_the_nearest_is_the_closest_spelling_or_what_the_name_begins(
    name: str, options: list[str], expected: str | None
) -> None:
    assert nearest(name, options) == expected


def test_an_option_with_white_space_is_quoted_so_that_it_is_seen() -> None:
    assert did_you_mean("answer", ["answer "]) == "; did you mean 'answer '?"

"""Nearest names, for errors that say what was probably meant. Standard library only."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MIN_PREFIX = 4  # a shorter beginning says too little about what was meant


def nearest(name: str, options: Iterable[str]) -> str | None:
    """The option that was probably meant by `name`, or None.

    The closest spelling, whatever its case; else the first option that begins with `name`.

    Example:
        >>> nearest("answer", ["question", "Answer"]), nearest("smol", ["tiny", "smollm2-135m"])
        ('Answer', 'smollm2-135m')
    """
    wanted, by_folded = name.casefold(), {option.casefold(): option for option in options}
    close = difflib.get_close_matches(wanted, by_folded, n=1)
    if not close and len(wanted) >= _MIN_PREFIX:
        close = [folded for folded in by_folded if folded.startswith(wanted)]
    return by_folded[close[0]] if close else None


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """The end of an error message: `"; did you mean x?"`, or nothing where no option is close.

    Example:
        >>> did_you_mean("clip_hgih", ["clip_low", "clip_high"]), did_you_mean("answer", ["zzz"])
        ('; did you mean clip_high?', '')
    """
    near = nearest(name, options)
    if near is None:
        return ""
    # An option with white space, at an end for instance, is only seen between quotes.
    return f"; did you mean {near if near.split() == [near] else repr(near)}?"

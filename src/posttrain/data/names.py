"""Nearest names, for errors that say what was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the closest option, or an empty string.

    Example:
        >>> did_you_mean("answer", ["question", "Answer"])
        "; did you mean 'Answer'?"
        >>> did_you_mean("answer", ["zzz"])
        ''
    """
    by_lower = {option.lower(): option for option in options}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""

"""Reading integers out of untrusted text, in bounded time."""

from __future__ import annotations

import re

# An answer of a million digits must cost nothing to refuse.
MAX_DIGITS = 19
INTEGER = rf"-?[0-9]{{1,{MAX_DIGITS}}}"

_WHOLE = re.compile(rf"({INTEGER})\.?")
_NUMBERS = re.compile(r"(?<![\w.])-?[0-9]+(?:\.[0-9]+)?(?!\w)")


def whole_integer(text: str) -> int | None:
    """The integer that is all of `text`, apart from outer space and one trailing period.

    Example:
        >>> whole_integer(" 42.\\n"), whole_integer("42 apples"), whole_integer("4.2")
        (42, None, None)
    """
    match = _WHOLE.fullmatch(text.strip())
    return int(match[1]) if match else None


def only_integer(text: str) -> int | None:
    """The integer in `text` when it holds exactly one number.

    Example:
        >>> only_integer("My guess is 4."), only_integer("4 or 5"), only_integer("3.5")
        (4, None, None)
    """
    numbers = _NUMBERS.findall(text)
    return whole_integer(numbers[0]) if len(numbers) == 1 else None

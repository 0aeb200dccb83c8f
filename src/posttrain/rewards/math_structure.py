"""The shape of an answer: lists, tuples and intervals, ratios, unions, matrices, equations.

Comparing shapes first is what keeps "only the right side" and "one of the parts" from counting as
the answer (huggingface/Math-Verify#14, #47).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from posttrain.rewards.math_text import canonical, join_thousands

_NAME = r"(?:\\?[A-Za-z]+(?:_\{?\w+\}?)?'?(?:\([A-Za-z0-9, ]*\))?)"
_MATRIX = re.compile(r"\\begin\{([pbvBV]?)matrix\}(.*)\\end\{[pbvBV]?matrix\}", re.DOTALL)
_MEMBER = re.compile(rf"({_NAME})\s*\\in(?![A-Za-z])\s*(.+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Item:
    """One expression or relation, as text."""

    text: str


@dataclass(frozen=True, slots=True)
class Bag:
    """Unordered: a list without brackets, a set, the two values of a plus-minus, a union."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """Ordered in brackets: a tuple, a point, an interval. `brackets` is for instance "(]"."""

    brackets: str
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Parts between colons: a ratio, a time."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix or a vector, by rows, whatever its brackets."""

    rows: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True, slots=True)
class Equation:
    """`name` is set when the left side is a mere name: x, f(x), AB. `value` is the last side."""

    name: str | None
    value: Node
    sides: tuple[str, ...]


Node = Item | Bag | Row | Ratio | Matrix | Equation


def read_structure(text: str) -> Node:
    """The shape of a normalised answer text.

    Example:
        >>> read_structure("x = 1, 2")
        Equation(name='x', value=Bag(items=(Item(text='1'), Item(text='2'))), sides=('x', '1, 2'))
    """
    text = join_thousands(text.strip())
    matrix = _MATRIX.fullmatch(text)
    if matrix is not None:
        rows = [row for row in re.split(r"\\\\", matrix[2]) if row.strip()]
        return Matrix(tuple(tuple(read_structure(c) for c in row.split("&")) for row in rows))
    listed = _split_list(text)
    if len(listed) > 1:
        return _read_list(listed)
    member = _MEMBER.fullmatch(text)
    if member is not None:
        return Equation(canonical(member[1]), read_structure(member[2]), (member[1], member[2]))
    sides = _split(text, "=")
    if len(sides) > 1 and all(sides):
        name = canonical(sides[0]) if re.fullmatch(_NAME, sides[0]) else None
        return Equation(name, read_structure(sides[-1]), tuple(sides))
    return _read_bracketed(text)


def _read_bracketed(text: str) -> Node:
    parts = _split(text, r"\cup")
    if len(parts) > 1:
        return Bag(tuple(read_structure(part) for part in parts))
    if text.startswith(r"\{") and text.endswith(r"\}") and _closes_at_end(text[1:-2] + "}"):
        inner = _split_list(text[2:-2])
        return Bag(tuple(read_structure(part) for part in inner if part))
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and _closes_at_end(text):
        inner = _split_list(text[1:-1])
        if len(inner) > 1:
            return Row(text[0] + text[-1], tuple(read_structure(part) for part in inner))
        if text[0] == "(" and len(text) > 3 and inner[0]:
            return read_structure(text[1:-1])
    ratio = _split(text, ":")
    if len(ratio) > 1 and all(ratio):
        return Ratio(tuple(read_structure(part) for part in ratio))
    if re.search(r"\\pm(?![A-Za-z])", text):
        plus = re.sub(r"\\pm(?![A-Za-z])", "+", re.sub(r"\\mp(?![A-Za-z])", "-", text))
        minus = re.sub(r"\\pm(?![A-Za-z])", "-", re.sub(r"\\mp(?![A-Za-z])", "+", text))
        return Bag(tuple(Item(t.strip().removeprefix("+").strip()) for t in (plus, minus)))
    return Item(text)


def _read_list(parts: list[str]) -> Node:
    """`n = 2, 3, 4` is one assignment of a list; `x = 1, y = 2` is a list of assignments."""
    nodes = tuple(read_structure(part) for part in parts if part)
    first = nodes[0]
    others_plain = not any(isinstance(node, Equation) for node in nodes[1:])
    if isinstance(first, Equation) and first.name is not None and others_plain:
        value = Bag((first.value, *nodes[1:]))
        return Equation(
            first.name, value, (first.sides[0], ", ".join([first.sides[-1], *parts[1:]]))
        )
    return Bag(nodes)


def _split_list(text: str) -> list[str]:
    """At commas, semicolons, "and" and "or" outside brackets."""
    text = re.sub(r"\s*[,;]?\s*\b(?:and|or)\b\s*", ", ", text)
    return _split(text.replace(";", ","), ",")


def _split(text: str, separator: str) -> list[str]:
    """At a separator outside brackets. An interval's brackets may be of different kinds."""
    parts, depth, start, position = [], 0, 0, 0
    while position < len(text):
        char = text[position]
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif depth <= 0 and text.startswith(separator, position):
            parts.append(text[start:position].strip())
            position += len(separator)
            start = position
            continue
        position += 1
    return [*parts, text[start:].strip()]


def _closes_at_end(text: str) -> bool:
    """Whether the bracket that opens the text closes with its last character."""
    depth = 0
    for position, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if depth == 0:
            return position == len(text) - 1
    return False

"""Whether an answer is the gold answer. Runs inside a grader worker: it may hang or crash there.

Shapes are compared first (`posttrain.rewards.math_structure`), then single expressions, which
math-verify parses. Rules for single expressions, gold against answer:

- Words are compared as text. Units are dropped when one side has none; different units differ.
- A percentage equals its number with or without the sign, and its hundredth: 50% is 50 and 0.5.
- **Rounding.** Integers and fractions are exact. A decimal that shows at least four significant
  digits may be a rounding of the other side: it is accepted when the other side, rounded half away
  from zero to as many places, is that decimal. So 33.33 is 100/3 and 33.3 (three digits) is not;
  1/12 is 0.0833333. Of two decimals the one with fewer places must be the rounding. Decimals inside
  a larger expression are exact.
- Otherwise two expressions are equal when they are exactly the same rational number, or agree to
  20 significant digits at several points where every variable is positive. Hence sqrt(1/n) is
  1/sqrt(n), and |x| is x.
- Equations are equal when they differ by a non-zero factor.
- A gold that is a plain number asks for a number: a sum, difference, product or, for an integer
  gold, quotient of numbers is not evaluated. An answer that copies an expression of the question
  and is not the gold as written is an echo. Both score 0.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import sympy
from math_verify import LatexExtractionConfig, parse, verify
from sympy.core.function import AppliedUndef

from posttrain.rewards.answers import NoAnswer, after_thinking, boxes, find_answer
from posttrain.rewards.math_structure import (
    Bag,
    Equation,
    Item,
    Matrix,
    Node,
    Ratio,
    Row,
    read_structure,
)
from posttrain.rewards.math_text import (
    Literal,
    canonical,
    is_words,
    normalise,
    read_literal,
    same_words,
    split_unit,
    to_latex,
    without_prose,
)

MAX_REGION = 2000  # characters; a longer "answer" is none
MAX_NESTING = 30
MIN_SIGNIFICANT_DIGITS = 4
AGREEING_DIGITS = 20
_RELATION = re.compile(r"\\(?:le|ge|ne|lt|gt)(?![A-Za-z])|[<>]")
_UNEVALUATED = re.compile(r"(?<=[\d)}!%])\s*(?:[+\-*]|\\times|\\cdot|\\div)\s*(?=[\d(\\{.-])")
_MIXED_NUMBER = re.compile(r"-?\s*\d+\s*\\frac\s*\{?\d+\}?\s*\{?\d+\}?")
_OPTION = re.compile(r"\(?([A-Za-z])\)?")
_BARE_UNIT = re.compile(r".*\d\s*[A-Za-z]")
_QUOTIENT = re.compile(r"[\d)}]\s*/\s*[\d(]|\\frac")

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that we brought our own limit


class GoldError(ValueError):
    """The gold answer itself cannot be read. A fault of the data, never a reward of 0."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A single expression: its text, whether it was a percentage, its unit."""

    text: str
    is_percent: bool
    unit: str


def grade(text: str, gold: str, prompt: str = "") -> dict[str, Any]:
    """Grade a completion: `correct`, `parsed`, `boxed` (booleans) and `evidence`.

    `boxed` says that the answer came in exactly one `\\boxed{}`. Raises GoldError.
    """
    gold_text, gold_node = read_gold(gold)
    found = find_answer(text)
    if isinstance(found, NoAnswer):
        return _grade(False, False, False, f"no answer: {found.reason}")
    boxed = found.rule == "boxed" and len(boxes(after_thinking(text) or "") or ()) == 1
    if len(found.text) > MAX_REGION:
        return _grade(False, False, boxed, f"no answer: {len(found.text)} characters long")
    answer = normalise(found.text)
    if not answer:
        return _grade(False, False, boxed, "no answer: only decoration")
    shown = f"{answer[:80]!r} ({found.rule})"
    if not brackets_match(answer):
        return _grade(False, True, boxed, f"{shown}: brackets do not match or nest too deep")
    correct = equal(gold_node, read_structure(answer))
    objection = unevaluated(answer, gold_text) or echo(answer, gold_text, prompt)
    if correct and objection:
        return _grade(False, True, boxed, f"{shown}: {objection}")
    return _grade(correct, True, boxed, f"{shown} {'is' if correct else 'is not'} the answer")


def brackets_match(text: str) -> bool:
    """As many open as close (half-open intervals mix their kinds), nested up to MAX_NESTING.

    The parser takes tens of seconds for a thousand open parentheses, and never finds a meaning.
    """
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    return depth == 0 and deepest <= MAX_NESTING


def control(gold: str) -> bool:
    """Whether the grader works on this gold at all: gold against gold. Raises GoldError."""
    _, node = read_gold(gold)
    return equal(node, node)


def read_gold(gold: str) -> tuple[str, Node]:
    """The gold's normalised text and shape: what follows "####", else its last box, else all.

    Raises GoldError when a part of it cannot be parsed.
    """
    if "####" in gold:
        gold = gold.rsplit("####", 1)[1]
    elif boxes(gold):
        gold = (boxes(gold) or [])[-1][2]
    text = normalise(gold)
    if not text:
        raise GoldError("the gold answer is empty")
    node = read_structure(text)
    _check_gold(node)
    return text, node


def _check_gold(node: Node) -> None:
    """Parse every part, so that the verdict on a bad gold does not depend on the answer."""
    if isinstance(node, Item):
        parse_gold(node.text)
    elif isinstance(node, Equation):
        _check_gold(node.value)
    else:
        parts = sum(node.rows, ()) if isinstance(node, Matrix) else node.items
        for part in parts:
            _check_gold(part)


def unevaluated(answer: str, gold: str) -> str | None:
    """An objection when arithmetic is left undone although the gold is a plain number."""
    quantity = _quantity(gold)
    literal = read_literal(quantity.text)
    text = _quantity(answer.rsplit("=", 1)[-1]).text
    if literal is None or r"\pm" in text:
        return None
    is_integer = literal.value.denominator == 1 and not quantity.is_percent
    if is_integer and _QUOTIENT.search(text) and not _MIXED_NUMBER.fullmatch(text):
        return "a quotient is left undone"
    exact_form = re.search(r"[A-Za-z]", re.sub(r"\\(?:times|cdot|div|frac)", "", text))
    if read_literal(text) is None and (is_integer or not exact_form) and _UNEVALUATED.search(text):
        return "the arithmetic is left undone"
    return None


def echo(answer: str, gold: str, prompt: str) -> str | None:
    """An objection when the answer copies an expression of the question that is not the gold."""
    key = canonical(answer)
    if key == canonical(gold) or not re.search(r"(?<=.)[-+*/^!]|\\|√", key):
        return None
    inside = rf"(?<![\w.]){re.escape(key)}(?![\w.]*\w)"
    return "copied from the question" if re.search(inside, without_prose(prompt)) else None


def equal(gold: Node, answer: Node) -> bool:
    """Gold against answer; the order of the arguments matters."""
    if isinstance(gold, Equation) or isinstance(answer, Equation):
        return _equal_equations(gold, answer)
    if isinstance(gold, Item) and isinstance(answer, Item):
        return equal_items(gold.text, answer.text)
    if isinstance(gold, Bag):
        if isinstance(answer, Row) and answer.brackets == "()":
            answer = Bag(answer.items)
        return isinstance(answer, Bag) and _match(gold.items, answer.items)
    if isinstance(gold, Row):
        if isinstance(answer, Row):
            return gold.brackets == answer.brackets and _all_equal(gold.items, answer.items)
        if isinstance(answer, Bag):  # a point without its parentheses keeps its order
            return gold.brackets == "()" and _all_equal(gold.items, answer.items)
        return isinstance(answer, Item) and _equal_interval(gold, answer)
    if isinstance(gold, Ratio):
        return isinstance(answer, Ratio) and _all_equal(gold.items, answer.items)
    if isinstance(gold, Matrix) and isinstance(answer, Matrix):
        return len(gold.rows) == len(answer.rows) and all(map(_all_equal, gold.rows, answer.rows))
    return False


def equal_items(gold_text: str, answer_text: str) -> bool:
    """Two single expressions."""
    if canonical(gold_text) == canonical(answer_text):
        return True
    gold, answer = _quantity(gold_text), _quantity(answer_text)
    has_unit = bool(answer.unit or _BARE_UNIT.fullmatch(answer.text))
    if gold.unit and has_unit and gold.unit != answer.unit:
        return False
    options = _OPTION.fullmatch(gold_text), _OPTION.fullmatch(answer_text)
    if options[0] and options[1]:
        return options[0][1] == options[1][1]
    if is_words(gold.text):
        return same_words(gold_text, answer_text)
    if is_words(answer.text):
        return False
    scales = {Fraction(1)}
    if gold.is_percent != answer.is_percent:
        scales.add(Fraction(1, 100) if answer.is_percent else Fraction(100))
    return any(_equal_scaled(gold.text, answer.text, scale) for scale in scales)


def parse_gold(text: str) -> Any:
    """The gold as an expression, or its text when it is words."""
    quantity = _quantity(text)
    if is_words(quantity.text) or r"\ldots" in text:
        return quantity.text
    parsed = parse_expression(quantity.text)
    if parsed is None:
        raise GoldError(f"the gold answer {text[:80]!r} cannot be parsed")
    return parsed


def parse_expression(text: str) -> Any:
    """A sympy object with positive variables, or None when math-verify finds no expression."""
    latex = to_latex(text)
    found = parse(
        f"${latex}$",
        [LatexExtractionConfig()],
        fallback_mode="no_fallback",
        parsing_timeout=None,  # type: ignore[arg-type]  # the parent of this process keeps time
    )
    return _positive(found[0]) if found else None


def _equal_scaled(gold_text: str, answer_text: str, scale: Fraction) -> bool:
    """Gold against answer times scale, literals first."""
    gold_literal, answer_literal = read_literal(gold_text), read_literal(answer_text)
    if gold_literal is not None and answer_literal is not None:
        return _equal_literals(gold_literal, _scaled(answer_literal, scale))
    gold, answer = parse_gold(gold_text), parse_expression(answer_text)
    if answer is None or isinstance(gold, str):
        return False
    if _RELATION.search(gold_text) or _RELATION.search(answer_text):
        return bool(
            _RELATION.search(gold_text)
            and _RELATION.search(answer_text)
            and verify(gold, answer, timeout_seconds=None)
        )
    for literal, other in ((gold_literal, answer), (answer_literal, gold)):
        if literal is not None and _is_rounding(literal, other, scale, literal is gold_literal):
            return True
    return equal_expressions(gold, answer * sympy.Rational(scale) if scale != 1 else answer)


def equal_expressions(gold: Any, answer: Any) -> bool:
    """Numerically equal at positive points; exact for rational numbers."""
    if gold == answer:
        return True
    if not isinstance(gold, sympy.Expr) or not isinstance(answer, sympy.Expr):
        return False
    gold, answer = gold.doit(), answer.doit()
    if gold.is_Rational and answer.is_Rational:
        return bool(gold == answer)
    compared = 0
    for point in _points(gold, answer):
        left, right = _value(gold, point), _value(answer, point)
        if left is None or right is None:
            continue
        if not _close(left, right):
            return False
        compared += 1
    if compared:
        return True
    return bool(sympy.simplify(gold - answer) == 0)


def _equal_equations(gold: Node, answer: Node) -> bool:
    if not isinstance(gold, Equation):
        # "2 + 3 = 5" and "x = 5" answer a question whose gold is 5.
        return isinstance(answer, Equation) and equal(gold, answer.value)
    if not isinstance(answer, Equation):
        return gold.name is not None and equal(gold.value, answer)
    if gold.name is not None and gold.name == answer.name and equal(gold.value, answer.value):
        return True
    if len(gold.sides) != len(answer.sides) or len(gold.sides) != 2:
        return canonical("=".join(gold.sides)) == canonical("=".join(answer.sides))
    sides = [parse_expression(_quantity(side).text) for side in (*gold.sides, *answer.sides)]
    if any(not isinstance(side, sympy.Expr) for side in sides):
        return False
    return _proportional(sides[0] - sides[1], sides[2] - sides[3])


def _proportional(gold: sympy.Expr, answer: sympy.Expr) -> bool:
    """Whether answer = factor * gold with one non-zero factor, at every point."""
    factor = None
    for point in _points(gold, answer):
        left, right = _value(gold, point), _value(answer, point)
        if left is None or right is None or left == 0 or right == 0:
            continue
        if factor is None:
            factor = right / left
        elif not _close(factor, right / left):
            return False
    return factor is not None and bool(gold.free_symbols)


def _equal_interval(gold: Row, answer: Item) -> bool:
    """An interval against an inequality, by math-verify."""
    if len(gold.items) != 2 or not _RELATION.search(answer.text):
        return False
    ends = ",".join(item.text for item in gold.items if isinstance(item, Item))
    interval = parse_expression(gold.brackets[0] + ends + gold.brackets[1])
    relation = parse_expression(answer.text)
    if interval is None or relation is None:
        return False
    return verify(interval, relation, allow_set_relation_comp=True, timeout_seconds=None)


def _all_equal(gold: Sequence[Node], answer: Sequence[Node]) -> bool:
    return len(gold) == len(answer) and all(map(equal, gold, answer))


def _match(gold: Sequence[Node], answer: Sequence[Node]) -> bool:
    """Each gold has its own answer and none is left over."""
    left = list(answer)
    for item in gold:
        index = next((i for i, other in enumerate(left) if equal(item, other)), None)
        if index is None:
            return False
        del left[index]
    return not left


def _equal_literals(gold: Literal, answer: Literal) -> bool:
    if gold.value == answer.value:
        return True
    gold_places, answer_places = gold.decimal_places, answer.decimal_places
    if answer_places is not None and (gold_places is None or answer_places < gold_places):
        return _rounds_to(gold.value, answer)
    if gold_places is not None and (answer_places is None or gold_places < answer_places):
        return _rounds_to(answer.value, gold)
    return False


def _rounds_to(value: Fraction, decimal: Literal) -> bool:
    if decimal.significant_digits < MIN_SIGNIFICANT_DIGITS or decimal.decimal_places is None:
        return False
    step = Fraction(10) ** -decimal.decimal_places
    units = abs(value) / step
    rounded = Fraction((units + Fraction(1, 2)).__floor__()) * step
    return decimal.value == (rounded if value >= 0 else -rounded)


def _is_rounding(literal: Literal, other: Any, scale: Fraction, literal_is_gold: bool) -> bool:
    """Whether a decimal literal is the rounding of an exact expression."""
    if literal.decimal_places is None or not isinstance(other, sympy.Expr) or other.free_symbols:
        return False
    value = _value(other.doit(), {})
    if value is None or not value.is_real:
        return False
    exact = Fraction(str(sympy.Float(value, 40)))
    if literal_is_gold:
        return _rounds_to(exact * scale, literal)
    return _rounds_to(exact, _scaled(literal, scale))


def _scaled(literal: Literal, scale: Fraction) -> Literal:
    shift = {Fraction(1): 0, Fraction(100): -2, Fraction(1, 100): 2}[scale]
    places = literal.decimal_places
    shown = None if places is None else places + shift
    return Literal(literal.value * scale, shown, literal.significant_digits)


def _quantity(text: str) -> Quantity:
    number, unit = split_unit(text)
    is_percent = number.endswith("%")
    return Quantity(number.rstrip("% ").strip(), is_percent, unit)


def _positive(expression: Any) -> Any:
    """Variables become positive, `i` the imaginary unit, unknown functions f(x) variables."""
    if not isinstance(expression, sympy.Basic):
        return expression
    names: dict[Any, Any] = {
        applied: sympy.Symbol(str(applied), positive=True)
        for applied in expression.atoms(AppliedUndef)
    }
    bound = {
        s
        for node in expression.atoms(sympy.Sum, sympy.Product, sympy.Integral)
        for s in node.variables
    }
    for symbol in expression.free_symbols - bound:
        name = str(symbol)
        names[symbol] = sympy.I if name == "i" else sympy.Symbol(name, positive=True)
    return expression.xreplace(names)


def _points(gold: sympy.Expr, answer: sympy.Expr) -> list[dict[Any, Any]]:
    """Fixed positive rational points for all variables of both; one empty point without any."""
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    if not symbols:
        return [{}]
    return [
        {
            s: sympy.Rational(17 + 12 * j + 5 * k * k, 13 + 3 * j + 7 * k)
            for j, s in enumerate(symbols)
        }
        for k in range(4)
    ]


def _value(expression: sympy.Expr, point: dict[Any, Any]) -> Any:
    """The number at a point to 40 digits, or None when there is none."""
    value = expression.subs(point) if point else expression
    number = value.evalf(40)
    if not number.is_number or number.has(sympy.nan, sympy.zoo):
        return None
    return number if number.is_comparable or number.is_finite or number.is_infinite else None


def _close(left: Any, right: Any) -> bool:
    if left == right:
        return True
    scale = max(abs(left), abs(right))
    if scale.is_infinite:
        return False
    return bool(abs(left - right) <= scale * sympy.Float(10) ** -AGREEING_DIGITS)


def _grade(correct: bool, parsed: bool, boxed: bool, evidence: str) -> dict[str, Any]:
    return {"correct": correct, "parsed": parsed, "boxed": boxed, "evidence": evidence}

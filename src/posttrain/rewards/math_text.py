"""Text of mathematical answers: decoration off, notation unified, literals read exactly.

Pure functions of strings. Source of the cases: issues of huggingface/Math-Verify.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_UNICODE = str.maketrans(
    {
        "\u2212": "-",
        "\u2013": "-",
        "\u00d7": r"\times ",
        "÷": "/",
        "·": r"\cdot ",
        "⋅": r"\cdot ",
        "π": r"\pi ",
        "∞": r"\infty ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "±": r"\pm ",
        "\u222a": r"\cup ",
        "∈": r"\in ",
        "°": r"^\circ ",
        "…": r"\ldots ",
        "²": "^{2}",
        "³": "^{3}",
        "\u00a0": " ",
        "\u202f": " ",
        "\u2009": " ",
    }
)
FUNCTIONS = (
    "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|sec|csc|cot|log|ln|exp|sqrt|binom|pi|infty"
)
_UNIT_COMMAND = re.compile(
    r"(?<=[\d}])\s*\\(?:text|mathrm|textrm|mbox|rm)\s*\{\s*([A-Za-z][A-Za-z\s./]*)\}"
    r"(?:\s*\^\s*\{?\s*[23]\s*\}?)?"
)
_TEXT_COMMAND = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname|boxed|fbox)"
    r"\s*\{([^{}]*)\}"
)
_SPACING = re.compile(
    r"(?<!\\)\\[,;:!> ]|\\(?:left|right|big|Big|bigg|Bigg|displaystyle|textstyle|quad|qquad)"
    r"(?![A-Za-z])|~"
)
_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3}(?:,\d{3})+)(?![\d,])")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\s*\{\s*(\d+)\s*\}")
_PLAIN_FRACTION = re.compile(r"(?<![\^\w.)}])(\d+)\s*/\s*(\d+)(?![\d.!^(])")
_LITERAL = re.compile(
    r"([+-]?)\s*(\d*)(?:\.(\d*))?(?:\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*\{?\s*([+-]?\d{1,3})\s*\}?)?"
)
_FRACTION = re.compile(
    r"([+-]?)\s*(?:(\d+)\s*/\s*(\d+)|\\frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\})"
)
_UNIT_WORDS = re.compile(
    r"(.*?\d[\d}!%]*)\s*((?:[A-Za-z]{2,}|per|/)(?:[\s/.-]+[A-Za-z]+)*)", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Literal:
    """A number as written: its exact value and, for a decimal, the digits it shows.

    `decimal_places` is None for an integer or a fraction, which claim to be exact.

    Example:
        >>> read_literal("33.3")
        Literal(value=Fraction(333, 10), decimal_places=1, significant_digits=3)
    """

    value: Fraction
    decimal_places: int | None
    significant_digits: int


def normalise(text: str) -> str:
    """Decoration, spacing commands, delimiters and synonyms of notation removed.

    Example:
        >>> normalise(r"**$\\text{13}$**."), normalise(r"\\dfrac{1}{2} \\, x")
        ('13', '\\\\frac{1}{2} x')
    """
    text = text.translate(_UNICODE)
    text = re.sub(r"\\?\$|(?<!\\)\\[()\[\]]", " ", text)
    text = _SPACING.sub(" ", text)
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text)
    text = _UNIT_COMMAND.sub(lambda m: f" {_unit_word(m[1])} ", text)
    for _ in range(3):  # nested wrappers, from inside out
        text = _TEXT_COMMAND.sub(r" \1 ", text)
    text = re.sub(
        r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree(?![A-Za-z])|(?<=\d)\s*degrees?\b", "", text
    )
    text = text.replace("**", " ") if text.count("**") % 2 == 0 else text
    text = text.replace(r"\%", "%").replace("{,}", ",").replace("`", " ")
    text = re.sub(r"\b(\d+(?:\.\d+)?)\s*percent\b", r"\1%", text)
    text = re.sub(r"\\(?:dots|ldots|cdots)(?![A-Za-z])|\.{3,}", r" \\ldots ", text)
    text = re.sub(r"\\leq(?![A-Za-z])|<=", r"\\le ", text)
    text = re.sub(r"\\geq(?![A-Za-z])|>=", r"\\ge ", text)
    text = re.sub(r"\\neq(?![A-Za-z])|!=", r"\\ne ", text)
    text = re.sub(r"\\lbrace(?![A-Za-z])", r"\\{", text)
    text = re.sub(r"\\rbrace(?![A-Za-z])", r"\\}", text)
    text = " ".join(text.split())
    return text.strip(" *_").rstrip(".,;: ").strip(" *_")


def canonical(text: str) -> str:
    """For comparing two writings of the same text: no spaces, one form of fraction, lower case
    for words.

    Example:
        >>> canonical(r"\\frac{1}{2} x") == canonical("1/2x")
        True
    """
    text = re.sub(r"\\frac\s*\{([^{}]+)\}\s*\{([^{}]+)\}", r"\1/\2", normalise(text))
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\1/\2", text)
    text = re.sub(r"\\times|\\cdot", "*", text)
    text = re.sub(r"\^\s*\{([^{}]+)\}", r"^\1", text)
    text = re.sub(r"[A-Za-z]{3,}", lambda m: m[0].casefold(), text)
    return re.sub(r"\s+", "", text)


def without_prose(text: str) -> str:
    """`canonical` of a question, with a bar for every word, so that formulas keep their borders.

    Example:
        >>> without_prose("Simplify 2 / 4 now")
        '|2/4|'
    """
    bare = re.sub(rf"(?<!\\)\b(?!(?:{FUNCTIONS})\b)[A-Za-z]{{2,}}\b", "|", normalise(text))
    return canonical(bare)


def join_thousands(text: str) -> str:
    """`1,234,567` is one number outside brackets; inside them the comma separates."""
    if text[:1] in "([" or text.startswith(r"\{"):
        return text
    return _THOUSANDS.sub(lambda m: m[1].replace(",", ""), text)


def split_unit(text: str) -> tuple[str, str]:
    """A quantity and its unit, in singular lower case, or an empty unit.

    Example:
        >>> split_unit("5 apples"), split_unit("5x")
        (('5', 'apple'), ('5x', ''))
    """
    match = _UNIT_WORDS.fullmatch(text.strip())
    if match is None or re.match(rf"(?:{FUNCTIONS})\b", match[2]):
        return text.strip(), ""
    return match[1].strip(), _unit_word(match[2])


def read_literal(text: str) -> Literal | None:
    """The number that the whole text is: integer, decimal, scientific notation or fraction."""
    text = text.strip()
    fraction = _FRACTION.fullmatch(text)
    if fraction is not None:
        numerator, denominator = int(fraction[2] or fraction[4]), int(fraction[3] or fraction[5])
        if denominator == 0:
            return None
        sign = -1 if fraction[1] == "-" else 1
        return Literal(sign * Fraction(numerator, denominator), None, 0)
    match = _LITERAL.fullmatch(text)
    if match is None or not (match[2] or match[3]):
        return None
    places = len(match[3] or "")
    exponent = int(match[4] or 0)
    digits = match[2] + (match[3] or "")
    if len(digits) > 4000:  # more than `int` converts, and no answer
        return None
    value = Fraction(int(digits)) * Fraction(10) ** (exponent - places)
    value = -value if match[1] == "-" else value
    shown = places - exponent
    return Literal(value, shown if places else None, len(digits.lstrip("0")))


def to_latex(text: str) -> str:
    """Plain notation as LaTeX that the parser reads as it was meant; decimals become fractions.

    Example:
        >>> to_latex("tan^2(y) + 2^10 + 1/2 x")
        '\\\\tan^2(y) + 2^{10} + \\\\frac{1}{2} x'
    """
    text = text.replace("**", "^")
    text = _REPEATING.sub(_repeating_fraction, text)
    text = re.sub(r"(\d*)\.(\d+)", _exact_decimal, text)
    text = re.sub(rf"(?<![\\A-Za-z])({FUNCTIONS})(?![A-Za-z])", r"\\\1", text)
    text = _brace_group(text, r"\sqrt(", r"\sqrt")
    text = _brace_group(text, "^(", "^")
    text = re.sub(r"\\sqrt\s*(\d+)", r"\\sqrt{\1}", text)
    text = re.sub(r"√\s*(\d+|[A-Za-z])", r"\\sqrt{\1}", text)
    text = re.sub(r"\^\s*(-?\d{2,}|-\d)", r"^{\1}", text)
    return _PLAIN_FRACTION.sub(r"\\frac{\1}{\2}", text)


def is_words(text: str) -> bool:
    """Whether an answer is words, to be compared as text: letters of three or more in a row that
    are no function, or a lone yes, no, or option letter.

    Example:
        >>> is_words("Tuesday"), is_words(r"\\\\sin x"), is_words("xy")
        (True, False, False)
    """
    bare = re.sub(r"\\[A-Za-z]+", " ", text)
    bare = re.sub(rf"\b(?:{FUNCTIONS})\b", " ", bare)
    if re.fullmatch(r"\s*(?:no|yes|\(?[A-Z]\)?)\s*", bare, re.IGNORECASE):
        return bare.strip().casefold() in ("no", "yes") or bare.strip().startswith("(")
    return re.search(r"[A-Za-z]{3,}", bare) is not None


def same_words(gold: str, answer: str) -> bool:
    """Equal letters and digits, whatever the case, spaces and punctuation."""
    gold_key, answer_key = (re.sub(r"[\W_]+", "", t).casefold() for t in (gold, answer))
    return bool(gold_key) and gold_key == answer_key


def _unit_word(text: str) -> str:
    word = "".join(text.split()).casefold().strip(".")
    return word[:-1] if len(word) > 2 and word.endswith("s") else word


def _exact_decimal(match: re.Match[str]) -> str:
    digits, places = match[1] + match[2], len(match[2])
    return rf"(\frac{{{digits.lstrip('0') or '0'}}}{{1{'0' * places}}})"


def _repeating_fraction(match: re.Match[str]) -> str:
    whole, fixed, cycle = match[1] or "0", match[2], match[3]
    value = Fraction(int(whole + fixed or "0")) / 10 ** len(fixed)
    value += Fraction(int(cycle), (10 ** len(cycle) - 1) * 10 ** len(fixed))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _brace_group(text: str, opening: str, head: str) -> str:
    """`head(...)` becomes `head{...}` wherever the parenthesis closes."""
    start = 0
    while (start := text.find(opening, start)) >= 0:
        depth, end = 1, start + len(opening)
        while end < len(text) and depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        if depth:
            break
        inner = text[start + len(opening) : end - 1]
        text = f"{text[:start]}{head}{{{inner}}}{text[end:]}"
        start += len(head)
    return text

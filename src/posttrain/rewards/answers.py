"""Where the final answer of a completion is. Exactly one region, or none with the reason.

The rules, in this order; the first that applies decides, and none looks further:

1. Thinking is cut off: everything up to the last closing `</think>` (also thinking, thought,
   reasoning). A thinking tag that never closes means that no answer was given.
2. `<answer>...</answer>`: if there is one, only its content counts; different ones are ambiguous.
3. `\\boxed{...}`: all boxes must hold the same. Boxes joined by nothing but "and", "or" or a comma
   are one list. Different boxes are ambiguous; a box that never closes is no answer.
4. A phrase: the last of "final answer:", "the answer is", "#### ". The region is the rest of its
   line (or the next line), up to the end of the sentence or to a word like "because"; if that holds
   formulas between dollars and no other digits, the formulas are the region.
5. One short line (at most 80 characters) without prose is the region as it stands: no word of two
   or more letters, or a single one that follows a number or stands alone.
6. Otherwise the only number, if the text has exactly one different number; several are ambiguous.
7. Otherwise one short line, as text; else there is no answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from posttrain.rewards.math_text import FUNCTIONS, canonical

SHORT = 80
_THINK_TAG = re.compile(r"<(/?)(?:think|thinking|thought|reasoning)>", re.IGNORECASE)
_ANSWER_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.IGNORECASE | re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BETWEEN_BOXES = re.compile(r"(?:[\s$,;*]|\\[()\[\]]|\\text\{|\}|and\b|or\b)*")
_PHRASE = re.compile(
    r"\b(?:final\s+)?answers?\b[*_]{0,2}(?:\s+(?:to|of|for)\b[^.\n:]{0,80}?)?"
    r"(?:\s*:|\s*=|\s+is\b|\s+are\b)[*_]{0,2}:?"
    r"|^[^\w\n]*final\s+answer[^\w\n]*$"
    r"|^####\s",
    re.IGNORECASE | re.MULTILINE,
)
_SENTENCE_END = re.compile(r"[.?](?=\s|[*_]*\s*$)")
_REASON = re.compile(r"[,;]?\s+(?:because|since|which|where|when|so|as)\b.*", re.DOTALL)
_LEAD = re.compile(
    r"(?:\s|[:*_]|is\b|equal to\b|equals\b|approximately\b|about\b|simply\b|just\b|therefore\b)*",
    re.IGNORECASE,
)
_SPAN = re.compile(r"(?<!\\)\$\$?(.+?)(?<!\\)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.\\])[-+\u2212]?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?(?:\s*\\?%)?")
_WORD = re.compile(r"(?<!\\)\b[A-Za-z']{2,}")
_NO_PROSE = frozenset(("and", "or", "frac", "text", *FUNCTIONS.split("|")))


@dataclass(frozen=True, slots=True)
class Region:
    """The final answer as written, and the rule that found it.

    Example:
        >>> find_answer("so it is \\\\boxed{42}.")
        Region(text='42', rule='boxed')
    """

    text: str
    rule: str


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """Why there is no single final answer."""

    reason: str


def find_answer(text: str) -> Region | NoAnswer:
    """Apply the rules at the top of this file."""
    visible = after_thinking(text)
    if visible is None:
        return NoAnswer("the thinking never ended")
    tagged = [content.strip() for content in _ANSWER_TAG.findall(visible)]
    if tagged:
        if _num_different(tagged) > 1:
            return NoAnswer(f"{len(tagged)} different <answer> tags")
        visible = tagged[-1]
    if not visible.strip():
        return NoAnswer("the answer is empty")
    return _from_boxes(visible) or _from_phrase(visible) or _from_whole(visible)


def after_thinking(text: str) -> str | None:
    """The text after the last closing tag; None when a tag is open at the end."""
    end, is_open = 0, False
    for tag in _THINK_TAG.finditer(text):
        is_open = not tag[1]
        end = end if is_open else tag.end()
    return None if is_open else text[end:]


def boxes(text: str) -> list[tuple[int, int, str]] | None:
    """(start, end, content) of each outermost box; None when one never closes."""
    found, position = [], 0
    while (match := _BOX.search(text, position)) is not None:
        depth, end = 1, match.end()
        while end < len(text) and depth:
            if text[end] == "\\":
                end += 1
            else:
                depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        if depth:
            return None
        found.append((match.start(), end, text[match.end() : end - 1].strip()))
        position = end
    return found


def _from_boxes(text: str) -> Region | NoAnswer | None:
    found = boxes(text)
    if found is None:
        return NoAnswer("a \\boxed{ that never closes")
    if not found:
        return None
    regions: list[str] = []
    last_end = -1
    for start, end, content in found:
        if not content:
            return NoAnswer("an empty \\boxed{}")
        if regions and _BETWEEN_BOXES.fullmatch(text, last_end, start):
            if canonical(content) != canonical(regions[-1]):
                regions[-1] += f", {content}"
        else:
            regions.append(content)
        last_end = end
    if _num_different(regions) > 1:
        return NoAnswer(f"several boxed answers: {'; '.join(regions)[:120]}")
    return Region(regions[-1], "boxed")


def _from_phrase(text: str) -> Region | NoAnswer | None:
    phrases = list(_PHRASE.finditer(text))
    if not phrases:
        return None
    match = phrases[-1]
    rest = text[match.end() :].lstrip(" \t\r\n*_:")
    display = re.match(r"(\$\$.+?\$\$|\\\[.+?\\\])", rest, re.DOTALL)
    line = display[1] if display else rest.split("\n", 1)[0]
    region = _narrow(line)
    if not region:
        return NoAnswer(f"nothing follows {match[0].strip()!r}")
    return Region(region, "phrase")


def _narrow(line: str) -> str:
    """The answer at the start of a line: without its explanation and its sentence."""
    end = _SENTENCE_END.search(line)
    if end is not None:
        line = line[: end.start()]
    line = _REASON.sub("", line)
    line = line[_LEAD.match(line).end() :]  # type: ignore[union-attr]  # matches anything
    spans = ["".join(groups).strip() for groups in _SPAN.findall(line)]
    if spans and not re.search(r"\d", _SPAN.sub(" ", line)):
        return ", ".join(spans)
    return line.strip()


def _from_whole(text: str) -> Region | NoAnswer:
    text = text.strip()
    short = len(text) <= SHORT and "\n" not in text
    words = [m for m in _WORD.finditer(text) if m[0].casefold() not in _NO_PROSE]
    digits = re.search(r"\d", text)
    # A word after the number may be its unit; before it, it is the start of a sentence.
    is_bare = not words or (len(words) == 1 and (not digits or digits.start() < words[0].start()))
    if short and is_bare:
        return Region(text, "whole")
    numbers = {canonical(n.rstrip(",")).replace(",", ""): n for n in _NUMBER.findall(text)}
    if len(numbers) == 1:
        return Region(next(iter(numbers.values())).rstrip(","), "number")
    if len(numbers) > 1:
        return NoAnswer(f"no \\boxed{{}} or 'answer is', and {len(numbers)} different numbers")
    return Region(text, "whole") if short else NoAnswer("no final answer in the text")


def _num_different(texts: list[str]) -> int:
    return len({canonical(text) for text in texts})

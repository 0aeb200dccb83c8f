"""Prompt templates with {named} placeholders and nothing else of Python's format language."""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping
from typing import Any

from posttrain.errors import ConfigError
from posttrain.names import did_you_mean


class PromptTemplate:
    """Text with {name} placeholders; `{{` and `}}` are literal braces.

    Attribute access, indexing and format specifications are refused: a template is data. Values
    go in verbatim, so braces inside them are safe.

    Example:
        >>> PromptTemplate("{q}\\nThink.", owner="env.template").render({"q": "1+{x}?"})
        '1+{x}?\\nThink.'
    """

    def __init__(self, text: str, *, owner: str) -> None:
        """`owner` names the setting in errors. Raises ConfigError when `text` is no template."""
        self.text, self.owner = text, owner
        try:
            pieces = list(string.Formatter().parse(text))
        except ValueError as error:
            raise ConfigError(
                f"{owner} is not a template: {error}; write {{{{ and }}}} for literal braces"
            ) from error
        for _, name, spec, conversion in pieces:
            if name is None:
                continue
            if not name or spec or conversion or any(c in name for c in ".[]{}"):
                raise ConfigError(
                    f"{owner} holds the placeholder {{{name}}}, which is not a plain name; "
                    "write {column}, or {{ and }} for literal braces"
                )
        self._pieces = tuple((literal, name) for literal, name, _, _ in pieces)

    @property
    def names(self) -> tuple[str, ...]:
        """Placeholders in order, each once."""
        return tuple(dict.fromkeys(name for _, name in self._pieces if name is not None))

    def require_known(self, options: Iterable[str]) -> None:
        """Raises ConfigError for a placeholder that is not among `options`."""
        known = list(options)
        for name in self.names:
            if name not in known:
                raise ConfigError(
                    f"{self.owner} holds {{{name}}}, but there are only "
                    f"{', '.join(known)}{did_you_mean(name, known)}"
                )

    def render(self, values: Mapping[str, Any]) -> str:
        """The text with values in place. Raises KeyError for a missing name."""
        return "".join(
            literal + ("" if name is None else str(values[name])) for literal, name in self._pieces
        )

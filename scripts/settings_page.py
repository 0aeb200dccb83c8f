"""Write docs/howto/settings.md from the sections of `posttrain.config`: every key, type, default.

    python scripts/settings_page.py

A section that may be one of several types gets a table for each; what several of them share is
listed once, in front. `tests/unit/test_documents.py` holds the page to what this writes.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from posttrain.config import Recipe

PAGE = Path(__file__).parents[1] / "docs" / "howto" / "settings.md"

_TOP = """# Settings

Every key of a recipe with its type, its default and what it does. Written by
[`scripts/settings_page.py`](../../scripts/settings_page.py) from
[`src/posttrain/config`](../../src/posttrain/config/__init__.py): change a description there and run
the script.

A key is set in TOML or on the command line (`optim.lr=1e-5`); an unknown one is an error. Where a
section has several types, `type` chooses, and the keys are those of that type and no other. A key
without a default must be given; "not set" means that leaving it out is different from any value.
`KEY=null` on the command line unsets a key that may be unset; what is on by default and may be off
is switched off with "none", in TOML too (`dual_clip = "none"`).
`posttrain check RECIPE` writes out every setting in force.

A loss, a correction or a shaping without keys may be written as its name alone:
`loss = "gspo"` is `loss = {type = "gspo"}`.
"""

# Sections that are described elsewhere on the page.
_SAME = {
    "algo_for.NAME": "As [`[algo]`](#algo), for one member of an environment mixture.",
    "env.members.NAME": "As [`[env]`](#env), of any type but `mixture`.",
}
_NAMES = {int: "integer", float: "number", str: "text", bool: "true or false", Any: "any value"}
_SIGNS = {
    annotated_types.Ge: (">=", "ge"),
    annotated_types.Gt: (">", "gt"),
    annotated_types.Le: ("<=", "le"),
    annotated_types.Lt: ("<", "lt"),
}


def page() -> str:
    """The whole page."""
    return "\n".join([_TOP, *_section(Recipe, "", "The recipe itself", 2)]).rstrip() + "\n"


def _section(model: type[BaseModel], path: str, title: str, level: int) -> Iterator[str]:
    """A section and the sections in it; those of the recipe itself stand beside it."""
    yield f"{'#' * level} {title}\n"
    if path:
        yield _summary(model) + "\n"
    yield from _table(model.model_fields)
    yield from _nested(model.model_fields, path, level + 1 if path else level)


def _nested(
    fields: Mapping[str, FieldInfo], path: str, level: int, owner: str = ""
) -> Iterator[str]:
    """The sections that fields hold. `owner` tells apart sections of one name."""
    for name, field in fields.items():
        models = _models(field.annotation)
        if not models:
            continue
        inner = f"{path}.{name}" if path else name
        if _holds(field.annotation, dict):
            inner += ".NAME"
        title = f"`[[{inner}]]`" if _holds(field.annotation, tuple) else f"`[{inner}]`"
        title += owner
        if inner in _SAME:
            yield f"{'#' * level} {title}\n\n{_SAME[inner]}\n"
        elif len(models) == 1:
            yield from _section(models[0], inner, title, level)
        else:
            yield from _union(models, inner, title, level)


def _union(models: Sequence[type[BaseModel]], path: str, title: str, level: int) -> Iterator[str]:
    """A table for each type, after one for each base that several of them share."""
    yield f"{'#' * level} {title}\n"
    yield "Types: " + ", ".join(f"`{_type_of(model)}`" for model in models) + ".\n"
    bases = _bases(models)
    for base in bases:
        yield f"Keys of {_those(base, models)}:\n"
        own = _declared(base, base.model_fields)
        yield from _table(own)
        yield from _nested(own, path, level + 1)
    for model in models:
        kind = _type_of(model)
        yield f'{"#" * (level + 1)} `type = "{kind}"`\n'
        yield _summary(model) + _page_of(kind, path) + "\n"
        own = _own(model, bases)
        yield from _table(own)
        yield from _nested(own, path, level + 2, f" of `{kind}`")


def _page_of(kind: str, path: str) -> str:
    """A link to the page of an algorithm, which has the meaning of its keys."""
    name = "gpg_advantages" if (path, kind) == ("algo", "gpg") else kind
    page = PAGE.parents[1] / "algorithms" / f"{name}.md"
    is_algorithm = path.startswith("algo") and page.is_file()
    return f" [Page](../algorithms/{name}.md)." if is_algorithm else ""


def _bases(models: Sequence[type[BaseModel]]) -> list[type[BaseModel]]:
    """Classes with fields of their own that several of the models derive from, widest first."""
    candidates = [c for m in models for c in m.__mro__ if c not in models]
    sections = [c for c in dict.fromkeys(candidates) if issubclass(c, BaseModel)]
    shared = [c for c in sections if c is not BaseModel and _declared(c, c.model_fields)]
    return sorted(
        (c for c in shared if sum(issubclass(m, c) for m in models) > 1),
        key=lambda c: -sum(issubclass(m, c) for m in models),
    )


def _those(base: type[BaseModel], models: Sequence[type[BaseModel]]) -> str:
    """ "every type", "every type but `a`", "`a` and `b`"."""
    others = [_type_of(m) for m in models if not issubclass(m, base)]
    if not others:
        return "every type"
    if len(others) < len(models) / 2:
        return "every type but " + _either([f"`{name}`" for name in others]).replace(
            " or ", " and "
        )
    names = [f"`{_type_of(m)}`" for m in models if issubclass(m, base)]
    return _either(names).replace(" or ", " and ")


def _own(model: type[BaseModel], bases: Sequence[type[BaseModel]]) -> dict[str, FieldInfo]:
    """Fields that no table of a base holds, or that the model declares anew."""
    found: dict[str, FieldInfo] = {}
    for cls in reversed(model.__mro__):
        if issubclass(cls, BaseModel) and cls not in bases:
            found |= _declared(cls, model.model_fields)
    return found


def _declared(cls: type[BaseModel], fields: Mapping[str, FieldInfo]) -> dict[str, FieldInfo]:
    own = inspect.get_annotations(cls)
    return {name: f for name, f in fields.items() if name in own and name != "type"}


def _table(fields: Mapping[str, FieldInfo]) -> Iterator[str]:
    rows = [
        f"| `{name}` | {_cell(_type(f.annotation, f.metadata))} | {_default(f, name)} | "
        f"{_cell(f.description or '')} |"
        for name, f in fields.items()
        if name != "type"
    ]
    if rows:
        yield "\n".join(["| key | type | default | |", "|---|---|---|---|", *rows]) + "\n"


def _summary(model: type[BaseModel]) -> str:
    text = inspect.cleandoc(model.__doc__ or "")
    return _linked(re.sub(r"\s*\n(?!\n)", " ", text.replace("\n\n", "\0")).replace("\0", "\n\n"))


def _cell(text: str) -> str:
    return _linked(text.replace("|", "\\|").replace("\n", " "))


def _linked(text: str) -> str:
    return re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def _type_of(model: type[BaseModel]) -> str:
    return str(model.model_fields["type"].default)


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a field holds, in order."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for arg in typing.get_args(annotation) for model in _models(arg)]


def _holds(annotation: Any, kind: type) -> bool:
    if typing.get_origin(annotation) is kind:
        return True
    return any(_holds(arg, kind) for arg in typing.get_args(annotation))


def _type(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type in words: "integer >= 1", "`"a"` or `"b"`", "list of text"."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(args[0], [*_flat(args[1:]), *metadata])
    if origin is typing.Literal:
        return _either([f"`{json.dumps(value)}`" for value in args])
    if _models(annotation) and origin is not dict:
        return "list of sections" if _holds(annotation, tuple) else "section"
    if origin in (typing.Union, types.UnionType):
        return _either([_type(arg, metadata) for arg in args if arg is not type(None)])
    if origin is tuple:
        several = args[-1] is Ellipsis
        inside = [_type(arg) for arg in args if arg is not Ellipsis]
        return f"list of {inside[0]}" if several else "[" + ", ".join(inside) + "]"
    if origin is dict:
        return "table of sections" if _models(annotation) else f"table of {_type(args[1])}"
    bounds = [
        f"{sign} {_number(getattr(item, attribute))}"
        for item in _flat(metadata)
        for kind, (sign, attribute) in _SIGNS.items()
        if isinstance(item, kind)
    ]
    return " ".join([_NAMES[annotation], " and ".join(bounds)]).strip()


def _either(words: Sequence[str]) -> str:
    return ", ".join(words[:-1]) + f" or {words[-1]}" if len(words) > 1 else words[0]


def _flat(metadata: Sequence[Any]) -> list[Any]:
    """Constraints, those inside of nested fields included."""
    found: list[Any] = []
    for item in metadata:
        found += item.metadata if isinstance(item, FieldInfo) else [item]
    return found


def _default(field: FieldInfo, name: str) -> str:
    if name == "name":
        return "the file's name"
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is PydanticUndefined:
        return ""
    if default is None:
        return "not set"
    if isinstance(default, BaseModel):
        kind = getattr(default, "type", None)
        return f"`{kind}`" if kind and len(_models(field.annotation)) > 1 else "its defaults"
    if default == {}:
        return "none"
    return f"`{_value(default)}`"


def _value(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, float):
        return _number(value)
    return json.dumps(value, ensure_ascii=False)


def _number(value: float) -> str:
    return re.sub(r"e([+-])0*(\d+)", lambda m: f"e{m[1].strip('+')}{m[2]}", repr(value))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

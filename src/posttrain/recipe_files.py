"""Reading recipes: TOML by name or path, `key=value` overrides, errors that say what to do."""

from __future__ import annotations

import json
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError

from posttrain.config import DatasetConfig, MixtureConfig, PythonEnvConfig, Recipe, Section
from posttrain.errors import ConfigError
from posttrain.names import did_you_mean, nearest

RECIPE = "recipe:"
"""Begins the path of a model that a recipe trains."""


def shipped_recipes() -> dict[str, Path]:
    """Recipes in the package, by name."""
    folder = Path(str(resources.files("posttrain") / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> tuple[Recipe, Path]:
    """The resolved recipe and the folder that its relative paths start from.

    Raises ConfigError naming recipe, key, fact and remedy.
    """
    path = _find(name_or_path)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {path.name}: is not valid TOML: {error}") from error
    except OSError as error:
        raise ConfigError(f"recipe {path}: cannot be read: {error}") from error
    values.setdefault("name", path.stem)
    folder = path.parent.resolve()
    return _with_absolute_paths(resolve(values, overrides, path.name), folder), folder


def resolve(values: dict[str, Any], overrides: Sequence[str], source: str) -> Recipe:
    """Apply `a.b=value` overrides and validate."""
    for override in overrides:
        _apply(values, override, source)
    _fill_default_types(values)
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(e, source) for e in error.errors())) from error


def to_toml(recipe: Recipe) -> str:
    """The resolved recipe, every default written out. Unset optional keys are left out; what is
    on by default and switched off is "none"."""
    return tomli_w.dumps(_without_null(recipe, recipe.model_dump(mode="json")))


def _without_null(section: Any, dumped: Any) -> Any:
    if isinstance(section, Section):
        values = {name: _without_null(getattr(section, name), dumped[name]) for name in dumped}
        off = {n: "none" for n, v in values.items() if v is None and section.switches_off(n)}
        return {n: v for n, v in values.items() if v is not None} | off
    if isinstance(section, tuple):
        return [_without_null(s, d) for s, d in zip(section, dumped, strict=True)]
    if isinstance(section, Mapping):
        return {name: _without_null(section[name], dumped[name]) for name in dumped}
    return dumped


def differences(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys whose values differ, with both values."""
    found: dict[str, Any] = {}
    for key in sorted(a.keys() | b.keys()):
        left, right = a.get(key), b.get(key)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            found |= differences(left, right, f"{prefix}{key}.")
        elif left != right:
            found[f"{prefix}{key}"] = (left, right)
    return found


def _with_absolute_paths(recipe: Recipe, folder: Path) -> Recipe:
    """Files of a recipe lie beside it or in the working directory; a run records where."""
    changed: dict[str, Any] = {
        "model": recipe.model.model_copy(update={"path": _model_path(recipe.model.path, folder)}),
        "algo": _teacher_absolute(recipe.algo, folder),
        "algo_for": {n: _teacher_absolute(algo, folder) for n, algo in recipe.algo_for.items()},
    }
    if recipe.data is not None:
        changed["data"] = recipe.data.model_copy(update=_data_paths(recipe.data, folder))
    if isinstance(recipe.env, MixtureConfig):
        members = {name: _env_absolute(env, folder) for name, env in recipe.env.members.items()}
        changed["env"] = recipe.env.model_copy(update={"members": members})
    elif recipe.env is not None:
        changed["env"] = _env_absolute(recipe.env, folder)
    return recipe.model_copy(update=changed)


def _env_absolute(env: Any, folder: Path) -> Any:
    if isinstance(env, PythonEnvConfig):
        return env.model_copy(update={"target": _target(env.target, folder)})
    if not isinstance(env, DatasetConfig):
        return env
    changed = {**_data_paths(env, folder), "reward": _target(env.reward, folder)}
    return env.model_copy(update=changed)


def _data_paths(section: Any, folder: Path) -> dict[str, str]:
    names = ("path", "eval_path") if section.eval_path is not None else ("path",)
    return {name: _absolute(getattr(section, name), folder) for name in names}


def _teacher_absolute(algo: Any, folder: Path) -> Any:
    if not hasattr(algo, "teacher"):
        return algo
    return algo.model_copy(update={"teacher": _model_path(algo.teacher, folder)})


def _model_path(given: str, folder: Path) -> str:
    """A bare word may be a known model's name, or a shipped recipe's after "recipe:"."""
    if given.startswith(RECIPE):
        file = given.removeprefix(RECIPE)
        return given if file in shipped_recipes() else f"{RECIPE}{_absolute(file, folder)}"
    if given.startswith(("~", ".", "/")) or ("/" in given and Path(given).is_dir()):
        return _absolute(given, Path.cwd())
    return given


def trained_models(recipe: Recipe) -> list[str]:
    """The models that a recipe takes from other recipes, as "recipe:NAME"."""
    algos = (recipe.algo, *recipe.algo_for.values())
    named = (recipe.model.path, *(getattr(algo, "teacher", "") for algo in algos))
    return [path for path in dict.fromkeys(named) if path.startswith(RECIPE)]


def _target(text: str, folder: Path) -> str:
    """ "FILE.py:NAME" with the file made absolute; any other text as it is."""
    file, colon, name = text.rpartition(":")
    return f"{_absolute(file, folder)}:{name}" if colon and file.endswith(".py") else text


def _absolute(path: str, folder: Path) -> str:
    given = Path(path).expanduser()
    for candidate in (folder / given, Path.cwd() / given):
        if candidate.exists():
            return str(candidate.resolve())
    return str(Path.cwd() / given)


def _find(name_or_path: str) -> Path:
    shipped = shipped_recipes()
    if name_or_path in shipped:
        return shipped[name_or_path]
    path = Path(name_or_path)
    if path.is_file():
        return path
    hint = did_you_mean(name_or_path, shipped) or f"; shipped recipes: {', '.join(shipped)}"
    raise ConfigError(f"recipe {name_or_path}: neither a shipped name nor a file{hint}")


def _apply(values: dict[str, Any], override: str, source: str) -> None:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(
            f"override {override!r}: is not key=value; write for instance num_steps=50"
        )
    *parents, leaf = key.split(".")
    target: dict[str, Any] = values
    for depth, parent in enumerate(parents):
        nested: Any = target.setdefault(parent, {})
        if isinstance(nested, str) and _sections_at(parents[: depth + 1]):
            nested = target[parent] = {"type": nested}  # `loss = "cispo"` in full
        if not isinstance(nested, dict):
            raise ConfigError(f"recipe {source}: {key} goes through {parent}, which is a value")
        target = nested
    value = _parse(text.strip(), none_is_text=_has_choice(key, "none"))
    if leaf == "type" and parents:
        _keep_what_fits(target, value, _sections_at(parents))
    target[leaf] = value


def _keep_what_fits(values: dict[str, Any], kind: Any, options: list[type[BaseModel]]) -> None:
    """Another type takes over the keys that it has; the rest goes."""
    for model in options:
        if model.model_fields["type"].default != kind or values.get("type") == kind:
            continue
        for name in [name for name in values if name != "type"]:
            field = model.model_fields.get(name)
            types = (
                [
                    m.model_fields["type"].default
                    for m in models_in(field.annotation)
                    if "type" in m.model_fields
                ]
                if field
                else []
            )
            inner = values[name]
            given = inner.get("type") if isinstance(inner, dict) else inner
            if field is None or (types and isinstance(given, str) and given not in types):
                del values[name]


def _sections_at(parts: Sequence[str]) -> list[type[BaseModel]]:
    """The sections that a path of keys may hold."""
    options: list[type[BaseModel]] = [Recipe]
    for part in parts:
        fields = [m.model_fields[part].annotation for m in options if part in m.model_fields]
        options = [model for annotation in fields for model in models_in(annotation)]
    return [model for model in options if "type" in model.model_fields]


def _fill_default_types(values: dict[str, Any], section: type[BaseModel] = Recipe) -> None:
    """A section that may be left out may leave out its type: `algo.loss.cap=2` is enough."""
    for name, field in section.model_fields.items():
        inner, options = values.get(name), models_in(field.annotation)
        if not isinstance(inner, dict) or not options or _is_container(field.annotation):
            continue
        if len(options) > 1 and field.default_factory:
            inner.setdefault("type", field.get_default(call_default_factory=True).type)
        for model in options:
            if len(options) == 1 or model.model_fields["type"].default == inner.get("type"):
                _fill_default_types(inner, model)


def _has_choice(key: str, choice: str) -> bool:
    """Whether `choice` is one of the words that the setting takes (algo.std=none)."""
    options: list[type[BaseModel]] = [Recipe]
    found: list[Any] = []
    for part in key.split("."):
        if any(_is_container(annotation) for annotation in found):
            found = []  # the part is a name in a table or a place in a list
            continue
        found = [m.model_fields[part].annotation for m in options if part in m.model_fields]
        options = [model for annotation in found for model in models_in(annotation)]
    return any(choice in typing.get_args(annotation) for annotation in found)


def _parse(text: str, none_is_text: bool) -> Any:
    """A TOML value, or the text itself where it is none (model.path=folder/x)."""
    if text == "null" or (text == "none" and not none_is_text):
        return None
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(error: Any, source: str) -> str:
    location = [str(part) for part in error["loc"]]
    options, keys = _walk(location)
    key = ".".join(keys) or "the recipe"
    kind, given = error["type"], error.get("input")
    if kind == "extra_forbidden":
        names = list(options[0].model_fields) if len(options) == 1 else []
        near = nearest(keys[-1], names)  # of the last part: what is before it was right
        meant = ".".join([*keys[:-1], near]) if near else ""
        hint = f"did you mean {meant}?" if near else f"known keys: {', '.join(names)}"
        return f"recipe {source}: {key} is unknown; {hint}"
    if kind == "missing":
        return f"recipe {source}: {key} is missing; add it"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        tags = ", ".join(model.model_fields["type"].default for model in options)
        if kind == "union_tag_not_found":
            return f"recipe {source}: {key} has no type; set {key}.type to one of {tags}"
        return f"recipe {source}: {key}.type is {error['ctx']['tag']!r}; use one of {tags}"
    message = error["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        return f"recipe {source}: {'' if key == 'the recipe' else key + ': '}{message}"
    return f"recipe {source}: {key} is {json.dumps(given, default=str)}; {_lower(message)}"


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]


def _walk(location: Sequence[str]) -> tuple[list[type[BaseModel]], list[str]]:
    """The sections that a pydantic location may end in, and its keys without union tags."""
    options: list[type[BaseModel]] = [Recipe]
    keys: list[str] = []
    annotation: Any = Recipe
    for part in location:
        if _is_container(annotation):
            keys.append(part)  # a name in a table or a place in a list
            annotation = None
            continue
        tagged = [m for m in options if len(options) > 1 and m.model_fields["type"].default == part]
        if tagged:
            options = tagged
            continue
        keys.append(part)
        if len(options) != 1 or part not in options[0].model_fields:
            break
        annotation = options[0].model_fields[part].annotation
        nested = models_in(annotation)
        if not nested:
            break
        options = nested
    return options, keys


def _is_container(annotation: Any) -> bool:
    """Whether an annotation is a table of sections or a list of them, or may be one."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(map(_is_container, inner))
    if origin is typing.Annotated:
        return _is_container(inner[0])
    return origin in (dict, tuple) and bool(models_in(annotation))


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a field may hold, in tables, lists and unions of unions too."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType, typing.Annotated, dict, tuple):
        return [m for a in typing.get_args(annotation) for m in models_in(a)]
    return []

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

from posttrain.config import DatasetConfig, PythonEnvConfig, Recipe
from posttrain.errors import ConfigError
from posttrain.names import did_you_mean, nearest


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
    """The resolved recipe, every default written out; unset optional keys are left out."""
    return tomli_w.dumps(recipe.model_dump(mode="json", exclude_none=True))


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
    given = recipe.model.path  # a bare word may be a known model's name
    if given.startswith(("~", ".", "/")) or ("/" in given and Path(given).is_dir()):
        model = recipe.model.model_copy(update={"path": _absolute(recipe.model.path, Path.cwd())})
        recipe = recipe.model_copy(update={"model": model})
    env = recipe.env
    if isinstance(env, PythonEnvConfig):
        return recipe.model_copy(
            update={"env": env.model_copy(update={"target": _target(env.target, folder)})}
        )
    if not isinstance(env, DatasetConfig):
        return recipe
    changed = {"path": _absolute(env.path, folder)}
    if env.eval_path is not None:
        changed["eval_path"] = _absolute(env.eval_path, folder)
    changed["reward"] = _target(env.reward, folder)
    return recipe.model_copy(update={"env": env.model_copy(update=changed)})


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
    target = values
    for parent in parents:
        nested = target.setdefault(parent, {})
        if not isinstance(nested, dict):
            raise ConfigError(f"recipe {source}: {key} goes through {parent}, which is a value")
        target = nested
    target[leaf] = _parse(text.strip(), none_is_text=_has_choice(key, "none"))


def _fill_default_types(values: dict[str, Any]) -> None:
    """A section that may be left out may leave out its type: `algo.clip_low=0.1` is enough."""
    for name, field in Recipe.model_fields.items():
        section = values.get(name)
        if field.discriminator and field.default_factory and isinstance(section, dict):
            section.setdefault("type", field.get_default(call_default_factory=True).type)


def _has_choice(key: str, choice: str) -> bool:
    """Whether `choice` is one of the words that the setting takes (algo.std=none)."""
    options: list[type[BaseModel]] = [Recipe]
    found: list[Any] = []
    for part in key.split("."):
        found = [m.model_fields[part].annotation for m in options if part in m.model_fields]
        options = [model for annotation in found for model in _models_in(annotation)]
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
    model, keys = _walk(location)
    key = ".".join(keys) or "the recipe"
    kind, given = error["type"], error.get("input")
    if kind == "extra_forbidden":
        names = list(model.model_fields) if model else []
        near = nearest(keys[-1], names)  # of the last part: what is before it was right
        meant = ".".join([*keys[:-1], near]) if near else ""
        hint = f"did you mean {meant}?" if near else f"known keys: {', '.join(names)}"
        return f"recipe {source}: {key} is unknown; {hint}"
    if kind == "missing":
        return f"recipe {source}: {key} is missing; add it"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        sections = _models_in(Recipe.model_fields[keys[0]].annotation)
        tags = ", ".join(section.model_fields["type"].default for section in sections)
        if kind == "union_tag_not_found":
            return f"recipe {source}: {key} has no type; set {key}.type to one of {tags}"
        return f"recipe {source}: {key}.type is {error['ctx']['tag']!r}; use one of {tags}"
    message = error["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        return f"recipe {source}: {'' if key == 'the recipe' else key + ': '}{message}"
    return f"recipe {source}: {key} is {json.dumps(given, default=str)}; {_lower(message)}"


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]


def _walk(location: Sequence[str]) -> tuple[type[BaseModel] | None, list[str]]:
    """The section that a pydantic location ends in, and its keys without union tags."""
    options: list[type[BaseModel]] = [Recipe]
    keys: list[str] = []
    for part in location:
        tagged = [m for m in options if len(options) > 1 and m.model_fields["type"].default == part]
        if tagged:
            options = tagged
            continue
        keys.append(part)
        if len(options) != 1 or part not in options[0].model_fields:
            break
        nested = _models_in(options[0].model_fields[part].annotation)
        if not nested:
            break
        options = nested
    return (options[0] if len(options) == 1 else None), keys


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType, typing.Annotated):
        return [m for a in typing.get_args(annotation) for m in _models_in(a)]
    return []

"""The user's reward function, inside a grader worker: load it, look at it, call it.

Nothing of it ever runs in the main process. Standard library only.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from posttrain.names import did_you_mean
from posttrain.targets import function_names, load_module, parse_target

# What a parameter may be named besides a column of the data. They win over columns.
KNOWN_PARAMETERS = ("completion", "completions", "prompt", "task", "messages")
SHOWN_LINES = 6

_loaded: LoadedFunction | None = None
_problem: str | None = None


class TaskView:
    """The task as a reward function sees it: `id`, `prompt`, and every column of its row.

    Example:
        >>> task = TaskView("r1", "1+1?", {"answer": "2"})
        >>> task.answer, task["answer"], task.id
        ('2', '2', 'r1')
    """

    def __init__(self, task_id: str, prompt: str, columns: Mapping[str, Any]) -> None:
        self.id = task_id
        self.prompt = prompt
        self.columns = MappingProxyType(dict(columns))

    def __getitem__(self, name: str) -> Any:
        if name not in self.columns:
            raise KeyError(_missing_column(name, self.columns))
        return self.columns[name]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "columns":
            raise AttributeError(name)
        if name not in self.columns:
            raise AttributeError(_missing_column(name, self.columns))
        return self.columns[name]


class LoadedFunction:
    """A function with the facts that calling it needs."""

    def __init__(self, function: Callable[..., Any], file: str) -> None:
        self.function = function
        self.file = file
        self.parameters = list(inspect.signature(function).parameters.values())
        self.runner: asyncio.Runner | None = None

    def arguments(self, facts: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments. Raises LookupError for a name that is nowhere."""
        columns = facts["columns"]
        known = {
            "completion": facts["completion"],
            "completions": facts["completions"],
            "messages": facts["messages"],
            "prompt": facts["prompt"],
            "task": TaskView(facts["task_id"], facts["prompt"], columns),
        }
        positional, keyword = [], {}
        for parameter in self.parameters:
            if parameter.kind is parameter.VAR_POSITIONAL:
                continue
            if parameter.kind is parameter.VAR_KEYWORD:
                keyword.update({**columns, **known} | keyword)
                continue
            name = parameter.name
            if name == "prompt" and _wants_list(parameter):
                value = facts["prompt_messages"]
            elif name in known:
                value = known[name]
            elif name in columns:
                value = columns[name]
            elif parameter.default is not parameter.empty:
                continue
            else:
                raise LookupError(_missing_parameter(name, columns))
            if parameter.kind is parameter.POSITIONAL_ONLY:
                positional.append(value)
            else:
                keyword[name] = value
        for name in [p.name for p in self.parameters if p.kind is p.POSITIONAL_ONLY]:
            keyword.pop(name, None)
        return positional, keyword

    def __call__(self, facts: Mapping[str, Any]) -> Any:
        positional, keyword = self.arguments(facts)
        result = self.function(*positional, **keyword)
        if inspect.isawaitable(result):
            self.runner = self.runner or asyncio.Runner()  # one loop, so clients can be kept
            return self.runner.run(_await(result))
        return result


def setup(spec: str, folders: list[str]) -> None:
    """Load the function. What goes wrong is kept for `describe` and `call` to tell."""
    global _loaded, _problem
    try:
        _loaded = load_function(spec, [Path(folder) for folder in folders])
    except (FileNotFoundError, LookupError, TypeError) as error:
        _problem = str(error)


def load_function(spec: str, folders: list[Path]) -> LoadedFunction:
    """Import the module and take the function out of it.

    Raises FileNotFoundError, LookupError (no such function, or the import failed; the message has
    the last lines of the user's traceback) or TypeError (not callable).
    """
    target = parse_target(spec)
    try:
        module = load_module(target, folders)
    except FileNotFoundError as error:
        if target.is_file and error.filename is None:  # ours; the user's own has a file name
            raise
        raise LookupError(_import_problem(target.place, error)) from error
    except (MemoryError, KeyboardInterrupt):
        raise
    except BaseException as error:  # boundary: the user's module may raise anything at all
        raise LookupError(_import_problem(target.place, error)) from error
    file = getattr(module, "__file__", None) or target.place
    names = function_names(module)
    if not hasattr(module, target.function):
        raise LookupError(
            f"{file} has no function {target.function!r}; it defines "
            f"{', '.join(names) or 'no function at all'}{did_you_mean(target.function, names)}"
        )
    function = getattr(module, target.function)
    if not callable(function) or inspect.isclass(function):
        raise TypeError(f"{file}: {target.function} is no function but {type(function).__name__}")
    return LoadedFunction(function, file)


def describe() -> dict[str, Any]:
    """Either `{"problem": text}` or the names of parameters that must come from somewhere."""
    if _loaded is None:
        return {"problem": _problem}
    required = [
        p.name
        for p in _loaded.parameters
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        and p.default is p.empty
        and p.name not in KNOWN_PARAMETERS
    ]
    return {"problem": None, "required_columns": required, "file": _loaded.file}


def call(**facts: Any) -> dict[str, Any]:
    """Grade once. The result is JSON data: `value` and `terms`, or `error`, or `bad_value`."""
    if _loaded is None:
        return {"error": _problem}
    try:
        result = _loaded(facts)
    except MemoryError:
        raise
    except BaseException as error:  # boundary: recorded as an Invalid verdict by the parent
        return {"error": _blame(error, _loaded.file)}
    return read_result(result)


def read_result(result: Any) -> dict[str, Any]:
    """`{"value", "terms"}` for a finite number or a dict with "reward", else `{"bad_value"}`.

    In a dict the other entries are terms: shown and recorded, never added to the reward.
    """
    if isinstance(result, Mapping):
        if "reward" not in result:
            keys = ", ".join(map(repr, list(result)[:8]))
            return {"bad_value": f'a dict without the key "reward" (it has {keys or "no key"})'}
        values = {str(name): _number(value) for name, value in result.items()}
        for name, number in values.items():
            if number is None:
                return {"bad_value": f"{_show(result[name])} under the key {name!r}"}
        return {"value": values.pop("reward"), "terms": values}
    number = _number(result)
    if number is None:
        return {"bad_value": _show(result)}
    return {"value": number, "terms": {}}


def _number(value: Any) -> float | None:
    """A finite float, or None. Zero-dimensional arrays and tensors count as their number."""
    if not isinstance(value, numbers.Real) and getattr(value, "ndim", None) == 0:
        value = value.item()
    if not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _show(value: Any) -> str:
    if value is None:
        return "None"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"


async def _await(awaitable: Any) -> Any:
    return await awaitable


def _wants_list(parameter: inspect.Parameter) -> bool:
    """Whether the annotation is a list, be it an object or text."""
    annotation = parameter.annotation
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    text = text.removeprefix("typing.").removeprefix("collections.abc.").casefold()
    return text.startswith(("list", "sequence"))


def _missing_column(name: str, columns: Mapping[str, Any]) -> str:
    return (
        f"the task has no column {name!r}; it has {', '.join(columns) or 'none'}"
        f"{did_you_mean(name, columns)}"
    )


def _missing_parameter(name: str, columns: Mapping[str, Any]) -> str:
    return (
        f"parameter {name!r} of the reward function is neither {', '.join(KNOWN_PARAMETERS)} "
        f"nor a column; {_missing_column(name, columns)}"
    )


def _import_problem(place: str, error: BaseException) -> str:
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    return f"importing {place} failed:\n" + "\n".join(lines[-SHOWN_LINES:])


def _blame(error: BaseException, file: str) -> str:
    """Type, message, and the deepest line of the user's file that led there."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if frame.filename == file:
            return f"{text[:500]} ({frame.filename}:{frame.lineno} in {frame.name})"
    return text[:500]

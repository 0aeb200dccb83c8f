"""Names of functions as recipes write them: "FILE.py:FUNCTION" or "package.module:FUNCTION".

Standard library only: grader workers import this before anything else.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType


@dataclass(frozen=True, slots=True)
class Target:
    """Where a function lives. `place` is a file path or a dotted module name.

    Example:
        >>> parse_target("grade.py:reward")
        Target(place='grade.py', function='reward')
        >>> parse_target("grade.py:reward").is_file
        True
    """

    place: str
    function: str

    @property
    def is_file(self) -> bool:
        return self.place.endswith(".py")


def parse_target(text: str) -> Target:
    """Split at the last colon. Raises ValueError when a part is missing or no identifier."""
    place, colon, function = text.rpartition(":")
    if not colon or not place or not function.isidentifier():
        raise ValueError(
            f'{text!r} names no function; write "FILE.py:FUNCTION" or "package.module:FUNCTION"'
        )
    return Target(place, function)


def find_file(place: str, folders: Iterable[Path]) -> Path:
    """The file `place`, absolute, or relative to the first folder that has it.

    Raises FileNotFoundError with every path that was tried.
    """
    path = Path(place).expanduser()
    tried = [path] if path.is_absolute() else [folder / path for folder in folders]
    for candidate in tried:
        if candidate.is_file():
            return candidate.resolve()
    raise FileNotFoundError(
        f"there is no file {' or '.join(dict.fromkeys(map(str, tried)))}; "
        "a relative path starts at the recipe's folder, then at the working directory"
    )


def load_module(target: Target, folders: Iterable[Path] = ()) -> ModuleType:
    """Import the module of a target; its own folder (or `folders`) can be imported from.

    Raises FileNotFoundError, or whatever the module raises while it is imported.
    """
    if not target.is_file:
        _prepend(*folders)
        return importlib.import_module(target.place)
    path = find_file(target.place, folders)
    _prepend(path.parent)
    # Prefixed, since a user's math.py must not replace the library's, and with the folder in it,
    # since two files of one name are two modules.
    name = f"_target_{path.stem}_{hashlib.sha256(bytes(path)).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded as a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def function_names(module: ModuleType) -> list[str]:
    """Public functions that a module defines itself, in the order of the file."""
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    ]


def _prepend(*folders: Path) -> None:
    for folder in reversed(folders):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))

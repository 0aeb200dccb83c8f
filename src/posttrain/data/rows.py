"""Rows of users: JSONL, JSON, CSV, Parquet, a folder saved by Hugging Face `datasets`."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.errors import DataError, MissingDependencyError
from posttrain.names import did_you_mean

_SHOWN = 5
_EXTRA = 'pip install "posttrain[data]"'


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its number (a line of a text file, else counted from 1) and its columns.

    Example:
        >>> Row(1, {"prompt": "hi"}).values["prompt"]
        'hi'
    """

    number: int
    values: dict[str, Any]


class RowError(Exception):
    """A row is no task. `reason` is short, so that rows can be counted by it."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


@dataclass(slots=True)
class BadRows:
    """Collects every unusable row, so that one error shows the whole damage.

    Example:
        >>> bad = BadRows("d.jsonl", "line")
        >>> bad.add(3, "prompt is empty")
        >>> bad.message(total=4)
        'd.jsonl: 1 of 4 rows cannot be used (1 x prompt is empty): line 3: prompt is empty'
    """

    source: str
    unit: str
    found: list[tuple[int, str, str]] = field(default_factory=list)

    def add(self, number: int, reason: str, detail: str = "") -> None:
        """`reason` is counted; `detail` is shown for the first rows."""
        self.found.append((number, reason, detail))

    def message(self, total: int) -> str:
        counts = Counter(reason for _, reason, _ in self.found)
        summary = ", ".join(f"{count} x {reason}" for reason, count in counts.most_common())
        ordered = sorted(self.found, key=lambda item: item[0])
        shown = "; ".join(
            f"{self.unit} {number}: {reason}{f' ({detail})' if detail else ''}"
            for number, reason, detail in ordered[:_SHOWN]
        )
        more = len(self.found) - _SHOWN
        tail = f"; and {more} more" if more > 0 else ""
        return (
            f"{self.source}: {len(self.found)} of {total} rows cannot be used ({summary}): "
            f"{shown}{tail}"
        )

    def raise_if_any(self, total: int) -> None:
        """Raises DataError when a row was added."""
        if self.found:
            raise DataError(f"{self.message(total)}. Mend or remove these rows")


@dataclass(frozen=True, slots=True)
class RowSet:
    """Readable rows of one file or folder, plus those that could not be read.

    `unit` is what a row number counts ("line" or "row"); `columns` are all names that occur, in
    the order of first appearance.

    Example:
        >>> RowSet("d.csv", "line", (Row(2, {"a": "1"}),), BadRows("d.csv", "line")).columns
        ('a',)
    """

    source: str
    unit: str
    rows: tuple[Row, ...]
    bad: BadRows

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for row in self.rows for name in row.values))

    def require_column(self, name: str, purpose: str) -> None:
        """Raises DataError when no row has the column."""
        columns = self.columns
        if name not in columns:
            raise DataError(
                f"{self.source} has no column {name!r}, which {purpose} needs; its columns are "
                f"{', '.join(map(repr, columns))}{did_you_mean(name, columns)}"
            )


def read_rows(path: Path, split: str = "train") -> RowSet:
    """Every row of `path`; the format follows from the name, or from what a folder holds.

    `split` picks a split of a saved `DatasetDict`. Raises DataError when the path is missing,
    of an unknown format, empty or unreadable, and MissingDependencyError when Parquet or a folder
    needs a package that is not installed.
    """
    if not path.exists():
        raise DataError(f"data set {path} does not exist; give a file or folder that does")
    if path.is_dir():
        result = _read_folder(path, split)
    else:
        reader = _READERS.get(path.suffix.lower())
        if reader is None:
            raise DataError(
                f"data set {path} ends in {path.suffix or 'nothing'!r}; known are "
                f"{', '.join(_READERS)} and a folder from datasets.save_to_disk"
            )
        if split != "train":
            raise DataError(
                f"split is {split!r} but {path} is a single file without splits; name the file "
                "that holds the split and leave split out"
            )
        result = reader(path)
    if not result.rows:
        result.bad.raise_if_any(len(result.bad.found))
        raise DataError(f"data set {path} is empty; it needs at least one row")
    return result


def _read_text(path: Path) -> str:
    raw = path.read_bytes()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path} line {line} is not UTF-8 (byte 0x{raw[error.start]:02x}); "
            f"convert it, for instance: iconv -f LATIN1 -t UTF-8 {path.name}"
        ) from error


def _read_jsonl(path: Path) -> RowSet:
    bad, rows = BadRows(str(path), "line"), []
    # Only a newline ends a row: splitlines() would also cut at U+2028 inside a JSON string.
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            bad.add(number, "not JSON", str(error))
            continue
        if isinstance(value, dict):
            rows.append(Row(number, value))
        else:
            bad.add(number, "not a JSON object", f"it is a {type(value).__name__}")
    return RowSet(str(path), "line", tuple(rows), bad)


def _read_json(path: Path) -> RowSet:
    try:
        value = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        hint = "; one object a line is .jsonl" if error.msg == "Extra data" else ""
        raise DataError(
            f"{path} line {error.lineno} is not JSON: {error.msg}{hint}; mend the file"
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not readable JSON: {error}; mend the file") from error
    if not isinstance(value, list):
        raise DataError(f"{path} holds a {type(value).__name__}; it needs a list of objects")
    bad, rows = BadRows(str(path), "row"), []
    for number, item in enumerate(value, start=1):
        if isinstance(item, dict):
            rows.append(Row(number, item))
        else:
            bad.add(number, "not a JSON object", f"it is a {type(item).__name__}")
    return RowSet(str(path), "row", tuple(rows), bad)


def _read_csv(path: Path) -> RowSet:
    bad, rows = BadRows(str(path), "line"), []
    reader = csv.reader(io.StringIO(_read_text(path), newline=""), strict=True)
    try:
        header = next(reader, [])
        for name, count in Counter(header).items():
            if count > 1 or not name.strip():
                raise DataError(
                    f"{path} line 1 is no header: the column name {name!r} occurs {count} x; "
                    "every column needs a name of its own"
                )
        while True:
            start = reader.line_num + 1  # a quoted field may span lines: cite the first
            cells = next(reader, None)
            if cells is None:
                break
            if len(cells) == len(header):
                rows.append(Row(start, dict(zip(header, cells, strict=True))))
            elif cells:
                bad.add(start, "wrong number of fields", f"{len(cells)}, header {len(header)}")
    except csv.Error as error:
        raise DataError(f"{path} line {reader.line_num} is not CSV: {error}; mend it") from error
    return RowSet(str(path), "line", tuple(rows), bad)


def _read_parquet(path: Path) -> RowSet:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise MissingDependencyError(f"{path} needs pyarrow: {_EXTRA}") from error
    try:
        # ParquetFile, not read_table: the latter takes columns out of folder names (a=1/...).
        with parquet.ParquetFile(path) as file:
            values = file.read().to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}") from error
    return _numbered(path, iter(values))


def _read_folder(path: Path, split: str) -> RowSet:
    if not any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
        raise DataError(
            f"data set {path} is a folder but not one from datasets.save_to_disk (no "
            "dataset_dict.json or state.json); name one of the files in it instead"
        )
    try:
        import datasets
    except ImportError as error:
        raise MissingDependencyError(f"{path} needs the datasets package: {_EXTRA}") from error
    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} is not a readable datasets folder: {error}") from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise DataError(
                f"{path} has no split {split!r}; it has {', '.join(map(repr, loaded))}"
                f"{did_you_mean(split, map(str, loaded))}"
            )
        loaded = loaded[split]
    elif split != "train":
        raise DataError(f"split is {split!r} but {path} holds a single data set; leave split out")
    return _numbered(path, iter(loaded))


def _numbered(path: Path, values: Iterator[Any]) -> RowSet:
    rows = tuple(Row(number, dict(value)) for number, value in enumerate(values, start=1))
    return RowSet(str(path), "row", rows, BadRows(str(path), "row"))


_READERS: dict[str, Callable[[Path], RowSet]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}

import json
import sys
from pathlib import Path

import pytest

from posttrain.data.rows import read_rows
from posttrain.errors import DataError, MissingDependencyError

ROWS = [{"prompt": "1+1", "answer": 2}, {"prompt": "é \u2028 ü", "answer": 0}]


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def as_jsonl(folder: Path) -> Path:
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    return write(folder / "d.jsonl", "\n".join(lines) + "\n\n")


def as_json(folder: Path) -> Path:
    return write(folder / "d.json", json.dumps(ROWS))


def as_parquet(folder: Path) -> Path:
    import pyarrow
    import pyarrow.parquet

    nested = folder / "kind=x"  # a folder that looks like a Hive partition adds no column
    nested.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), nested / "d.parquet")
    return nested / "d.parquet"


def as_folder(folder: Path) -> Path:
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(str(folder / "hf"))
    return folder / "hf"


@pytest.mark.parametrize("make", [as_jsonl, as_json, as_parquet, as_folder])
def test_every_format_gives_the_same_rows(tmp_path: Path, make) -> None:
    rows = read_rows(make(tmp_path))
    assert [row.values for row in rows.rows] == ROWS
    assert [row.number for row in rows.rows] == [1, 2]
    assert rows.columns == ("prompt", "answer")


def test_csv_rows_carry_the_line_they_start_on(tmp_path: Path) -> None:
    text = '\ufeffprompt,answer\n"two\nlines",1\n"a ""quoted"" one",\n'
    rows = read_rows(write(tmp_path / "d.csv", text)).rows
    assert [(r.number, r.values["prompt"], r.values["answer"]) for r in rows] == [
        (2, "two\nlines", "1"),
        (4, 'a "quoted" one', ""),
    ]


def test_broken_rows_are_collected_with_their_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", '{"prompt": "a"}\n{"prompt": \n\n[1]\n{"prompt": "b"}')
    rows = read_rows(path)
    assert [(n, reason) for n, reason, _ in rows.bad.found] == [
        (2, "not JSON"),
        (4, "not a JSON object"),
    ]
    assert [row.number for row in rows.rows] == [1, 5]


def test_a_csv_row_with_missing_fields_is_named(tmp_path: Path) -> None:
    rows = read_rows(write(tmp_path / "d.csv", "prompt,answer\na,1\nb\nc,3,4\n"))
    assert [(n, detail) for n, _, detail in rows.bad.found] == [
        (3, "1, header 2"),
        (4, "3, header 2"),
    ]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("d.jsonl", "", "is empty"),
        ("d.jsonl", "\n  \n", "is empty"),
        ("d.json", "[]", "is empty"),
        ("d.csv", "prompt,answer\n", "is empty"),
        ("d.csv", "", "is empty"),
        ("d.jsonl", "nonsense\n", r"1 of 1 rows .*line 1: not JSON"),
        ("d.jsonl", b'{"prompt": "a"}\n{"prompt": "\xe9"}\n', "line 2 is not UTF-8.*0xe9"),
        ("d.json", '{"prompt": "a"}', "holds a dict; it needs a list"),
        ("d.json", '{"a": 1}\n{"a": 2}', r"line 2 is not JSON.*\.jsonl"),
        ("d.csv", "a,a\n1,2\n", "'a' occurs 2 x"),
        ("d.csv", 'a,b\n"open,2\n', "is not CSV"),
        ("d.parquet", "no parquet", "not a readable Parquet file"),
        ("d.txt", "x", r"ends in '\.txt'; known are \.jsonl"),
    ],
)
def test_an_unusable_file_says_why(tmp_path: Path, name: str, content, says: str) -> None:
    with pytest.raises(DataError, match=says):
        read_rows(write(tmp_path / name, content))


def test_a_missing_path_and_a_foreign_folder_are_explained(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        read_rows(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match=r"not one from datasets\.save_to_disk"):
        read_rows(tmp_path)


def test_a_split_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    import datasets

    data = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": data, "test": data.select([1])}).save_to_disk(str(tmp_path))
    assert len(read_rows(tmp_path, "test").rows) == 1
    with pytest.raises(DataError, match=r"no split 'tets'.*'train', 'test'.*did you mean test"):
        read_rows(tmp_path, "tets")


def test_a_split_of_a_plain_file_is_refused_rather_than_ignored(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"split is 'test' but .* without splits"):
        read_rows(as_jsonl(tmp_path), "test")


@pytest.mark.parametrize(
    ("make", "package"), [(as_parquet, "pyarrow"), (as_folder, "datasets")], ids=str
)
def test_a_missing_package_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make, package: str
) -> None:
    path = make(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError, match=r"posttrain\[data\]"):
        read_rows(path)


def test_a_missing_column_names_the_nearest(tmp_path: Path) -> None:
    """l07"""
    rows = read_rows(write(tmp_path / "d.jsonl", '{"prompt": "a", "Answer": 1}'))
    with pytest.raises(DataError, match="'prompt', 'Answer'; did you mean Answer"):
        rows.require_column("answer", "the reward")

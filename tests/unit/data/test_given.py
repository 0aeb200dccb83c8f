"""Given rows: refused with their lines all at once, split by prompt, and never mixed up."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from posttrain.config import DemonstrationsConfig, PairsConfig
from posttrain.data.given import answers, given_tasks
from posttrain.errors import DataError
from posttrain.types import Task

Rows = list[dict[str, Any]]


def rows_of(count: int) -> Rows:
    return [{"prompt": f"p{i}", "completion": f"a{i}"} for i in range(count)]


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., tuple[list[Task], list[Task]]]:
    """Rows as JSONL, read: load(rows, kind="pairs", eval_frac=.5)."""

    def read(rows: Rows, kind: str = "demonstrations", **fields: Any) -> Any:
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
        config = {"demonstrations": DemonstrationsConfig, "pairs": PairsConfig}[kind]
        return given_tasks(config(path="rows.jsonl", **fields), tmp_path)

    return read


def said(tasks: list[Task]) -> dict[str, list[str]]:
    return {t.prompt[-1].plain_text(): [a.text for a in answers(t)] for t in tasks}


def test_every_row_is_a_task_with_its_own_answer(load: Any) -> None:
    train, held_out = load(rows_of(20))
    assert said(train) | said(held_out) == {f"p{i}": [f"a{i}"] for i in range(20)}
    assert len({t.task_id for t in [*train, *held_out]}) == 20
    assert (len(train), len(held_out)) == (18, 2)


def test_a_pair_is_its_chosen_and_its_rejected_answer_in_this_order(load: Any) -> None:
    rows = [{"prompt": f"p{i}", "chosen": f"good{i}", "rejected": f"bad{i}"} for i in range(4)]
    train, _ = load(rows, "pairs")
    for task in train:
        number = task.prompt[-1].plain_text()[1:]
        given = [(a.role, a.reward, a.text) for a in answers(task)]
        assert given == [("chosen", 1.0, f"good{number}"), ("rejected", 0.0, f"bad{number}")]


def test_what_is_held_out_does_not_depend_on_the_order_of_the_rows(load: Any) -> None:
    rows = rows_of(50)
    _, before = load(rows)
    random.Random(3).shuffle(rows)
    train, after = load(rows)
    assert said(before) == said(after)
    assert not said(train).keys() & said(after).keys()


def test_rows_of_one_prompt_are_never_on_both_sides(load: Any) -> None:
    rows = [{"prompt": f"p{i % 10}", "completion": f"a{i}"} for i in range(60)]
    train, held_out = load(rows, eval_frac=0.3)
    assert not said(train).keys() & said(held_out).keys()
    assert (len(train), len(held_out)) == (42, 18)


def test_a_file_of_its_own_is_held_out_and_nothing_of_the_other(load: Any, tmp_path: Path) -> None:
    (tmp_path / "held.jsonl").write_text('{"prompt": "q", "completion": "b"}')
    train, held_out = load(rows_of(5), eval_path="held.jsonl")
    assert len(train) == 5 and said(held_out) == {"q": ["b"]}


def test_prompts_that_are_in_both_files_are_said(
    load: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "held.jsonl").write_text('{"prompt": "p3", "completion": "other"}')
    load(rows_of(5), eval_path="held.jsonl")
    assert "1 identical prompts are in both" in caplog.text and "not held out" in caplog.text


def test_a_setting_of_the_split_is_refused_where_nothing_is_split() -> None:
    with pytest.raises(ValidationError, match=r"eval_frac has no effect with eval_path"):
        DemonstrationsConfig(path="a.jsonl", eval_path="b.jsonl", eval_frac=0.3)


BAD_DEMONSTRATIONS: list[tuple[Any, str]] = [
    (None, "completion is null"),
    ("", "completion is empty"),
    (" \n\t", "completion is empty"),
    (7, "completion is a int, not text"),
    (["a"], "completion is a list, not text"),
    ("\ud800", "completion is not valid Unicode"),
]


@pytest.mark.parametrize(("value", "reason"), BAD_DEMONSTRATIONS)
def test_an_unusable_answer_is_refused_with_line_and_reason(
    value: Any, reason: str, load: Any
) -> None:
    rows = [*rows_of(2), {"prompt": "p", "completion": value}]
    with pytest.raises(DataError, match=r"1 of 3 rows") as refused:
        load(rows)
    assert f"line 3: {reason}" in str(refused.value)


def test_all_unusable_rows_are_shown_at_once_and_counted_by_reason(load: Any) -> None:
    rows: Rows = [
        {"prompt": "p1", "chosen": "a", "rejected": "b"},
        {"prompt": "p2", "chosen": "a", "rejected": "a"},
        {"prompt": "p3", "chosen": None, "rejected": "a"},
        {"prompt": None, "chosen": "a", "rejected": "b"},
        {"prompt": " ", "chosen": "a", "rejected": "b"},
        {"prompt": "p6", "chosen": "a", "rejected": "a"},
        {"prompt": "p7", "chosen": "a"},
    ]
    with pytest.raises(DataError) as refused:
        load(rows, "pairs")
    message = str(refused.value)
    assert "6 of 7 rows" in message and "2 x chosen and rejected are the same" in message
    for part in ("line 2: chosen and rejected are the same", "line 3: chosen is null"):
        assert part in message
    for part in ("line 4: prompt is null", "line 5: prompt is empty", "and 1 more"):
        assert part in message


def test_a_missing_column_is_named_with_the_nearest_one(load: Any) -> None:
    rows = [{"prompt": "p", "completions": "a"}]
    with pytest.raises(DataError, match=r"no column 'completion', which data.completion needs"):
        load(rows)


def test_one_prompt_alone_cannot_be_split(load: Any) -> None:
    with pytest.raises(DataError, match=r"add rows or set data.eval_path"):
        load([{"prompt": "p", "completion": "a"}, {"prompt": "p", "completion": "b"}])


def test_columns_may_have_other_names_and_prompts_may_be_messages(load: Any) -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    rows = [{"input": chat, "output": "a"}, {"input": "plain", "output": "b"}]
    train, held_out = load(rows, prompt="input", completion="output", system="mine")
    shown = {tuple(m.plain_text() for m in t.prompt) for t in [*train, *held_out]}
    assert shown == {("s", "q"), ("mine", "plain")}


@pytest.mark.parametrize("kind", ["csv", "json", "parquet"])
def test_rows_come_from_any_format(kind: str, tmp_path: Path) -> None:
    rows, path = rows_of(6), tmp_path / f"rows.{kind}"
    if kind == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["prompt", "completion"])
            writer.writeheader()
            writer.writerows(rows)
    elif kind == "json":
        path.write_text(json.dumps(rows))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    train, held_out = given_tasks(DemonstrationsConfig(path=path.name), tmp_path)
    assert said(train) | said(held_out) == {f"p{i}": [f"a{i}"] for i in range(6)}

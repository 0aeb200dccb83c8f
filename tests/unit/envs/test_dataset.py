import asyncio
import json
import logging
from pathlib import Path

import pytest

from posttrain.config import DatasetConfig
from posttrain.envs import build_env_spec
from posttrain.envs.dataset import DatasetSpec
from posttrain.errors import ConfigError, DataError
from posttrain.rewards.function import FunctionReward
from posttrain.types import Task


def save(folder: Path, rows: list, name: str = "d.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def rows(count: int, start: int = 0) -> list[dict]:
    return [{"prompt": f"question {i}", "answer": i} for i in range(start, start + count)]


def build(folder: Path, **settings) -> DatasetSpec:
    config = DatasetConfig(**{"path": "d.jsonl", "reward": "exact", **settings})
    spec = build_env_spec(config, seed=0, base_dir=folder)
    assert isinstance(spec, DatasetSpec)
    return spec


def listed(tasks) -> list[Task]:
    return [tasks[i] for i in range(len(tasks))]


def prompts(tasks) -> list[str]:
    return [task.prompt[-1].plain_text() for task in listed(tasks)]


def test_every_other_column_reaches_the_reward_and_none_the_prompt(tmp_path: Path) -> None:
    """l07: no column is dropped as unused."""
    extra = {"unused": [1, {"a": None}], "Level": "hard", "completion_id": 3}
    save(tmp_path, [{**row, **extra} for row in rows(10)])
    spec = build(tmp_path)
    for task in listed(spec.train_tasks()):
        hidden = task.hidden.reveal()
        assert hidden == {"answer": hidden["answer"], **extra}
        assert task.prompt[0].plain_text() == f"question {hidden['answer']}"
        assert set(task.metadata) == {"source", "line"}
    assert spec.columns == ("answer", *extra)


def test_a_missing_answer_column_lists_the_columns_and_the_nearest(tmp_path: Path) -> None:
    """l07: the reward needs 'answer', the data has 'Answer'."""
    save(tmp_path, [{"prompt": "a", "Answer": 1}, {"prompt": "b", "Answer": 2}])
    with pytest.raises(DataError, match=r"'answer'.*'prompt', 'Answer'; did you mean Answer"):
        build(tmp_path)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"prompt": "promt"}, "env.prompt needs.*did you mean prompt"),
        ({"template": "{promt}"}, "env.template needs.*did you mean prompt"),
        ({"id_column": "id"}, "env.id_column needs"),
    ],
)
def test_a_setting_that_names_no_column_is_an_error(tmp_path: Path, settings, says) -> None:
    save(tmp_path, rows(4))
    with pytest.raises(DataError, match=says):
        build(tmp_path, **settings)


def test_all_bad_rows_are_shown_at_once_with_lines_and_counts(tmp_path: Path) -> None:
    """l11: '', spaces, no message, null answer are refused; the rest of the file is read."""
    save(
        tmp_path,
        [
            {"prompt": "good", "answer": "1"},
            {"prompt": "", "answer": "1"},
            {"prompt": "  \n", "answer": "1"},
            {"prompt": [], "answer": "1"},
            {"prompt": "a", "answer": None},
            {"prompt": "b", "answer": " "},
            {"prompt": "c"},
        ],
    )
    with (tmp_path / "d.jsonl").open("a") as file:
        file.write("{broken\n")
    with pytest.raises(DataError) as caught:
        build(tmp_path)
    message = str(caught.value)
    assert "7 of 8 rows cannot be used" in message
    for count in (
        "2 x prompt is empty",
        "1 x prompt has no message",
        "1 x answer is null",
        "1 x answer is empty",
        "1 x column 'answer' is missing",
        "1 x not JSON",
    ):
        assert count in message
    for line in (2, 3, 4, 5, 6):
        assert f"line {line}: " in message
    assert "and 2 more" in message


def test_zero_and_false_are_answers(tmp_path: Path) -> None:
    """l11: gold 0 is not missing."""
    save(tmp_path, [{"prompt": f"q{i}", "answer": gold} for i, gold in enumerate((0, False, 0.0))])
    spec = build(tmp_path)
    tasks = listed(spec.train_tasks()) + listed(spec.eval_tasks())
    golds = {task.prompt[0].plain_text(): task.hidden.reveal()["answer"] for task in tasks}
    assert [(golds[q], type(golds[q])) for q in ("q0", "q1", "q2")] == [
        (0, int),
        (False, bool),
        (0.0, float),
    ]


def test_a_null_answer_is_the_functions_business_when_a_function_grades(tmp_path: Path) -> None:
    save(tmp_path, [{"prompt": f"q{i}", "answer": None} for i in range(3)])
    assert len(build(tmp_path, reward="grade.py:f").train_tasks()) == 2


def test_every_row_refused_says_why_per_reason(tmp_path: Path) -> None:
    """l05"""
    save(tmp_path, [{"prompt": "", "answer": 1}] * 3 + [{"prompt": "a", "answer": None}] * 2)
    with pytest.raises(DataError, match=r"5 of 5 .*3 x prompt is empty, 2 x answer is null"):
        build(tmp_path)


def test_three_rows_are_enough(tmp_path: Path) -> None:
    """l05: fewer rows than a step draws."""
    save(tmp_path, rows(3))
    spec = build(tmp_path)
    assert (len(spec.train_tasks()), len(spec.eval_tasks())) == (2, 1)


def test_one_distinct_prompt_cannot_be_split(tmp_path: Path) -> None:
    save(tmp_path, [{"prompt": "same", "answer": i} for i in range(5)])
    with pytest.raises(DataError, match="5 rows with 1 different prompt"):
        build(tmp_path)


def test_rows_that_share_an_id_stay_different_tasks(tmp_path: Path) -> None:
    """l06: two prompts with id 7, and the same prompt twice."""
    save(
        tmp_path,
        [
            {"id": 7, "prompt": "first", "answer": 1},
            {"id": 7, "prompt": "second", "answer": 2},
            {"id": 8, "prompt": "second", "answer": 2},
            {"id": 9, "prompt": "third", "answer": 3},
        ],
    )
    spec = build(tmp_path)
    tasks = listed(spec.train_tasks()) + listed(spec.eval_tasks())
    assert sorted(task.task_id for task in tasks) == ["d:1", "d:2", "d:3", "d:4"]
    with pytest.raises(DataError, match=r"id_column 'id' repeats '7' \(2 x\)"):
        build(tmp_path, id_column="id")


def test_an_id_column_names_the_tasks(tmp_path: Path) -> None:
    save(tmp_path, [{"prompt": f"q{i}", "answer": i, "id": i} for i in range(4)])
    spec = build(tmp_path, id_column="id")
    tasks = listed(spec.train_tasks()) + listed(spec.eval_tasks())
    assert {task.task_id: task.hidden.reveal()["answer"] for task in tasks} == {
        str(i): i for i in range(4)
    }


def test_identical_prompts_never_straddle_the_split(tmp_path: Path) -> None:
    """k11"""
    save(tmp_path, [{"prompt": f"q{i % 20}", "answer": i} for i in range(100)])
    spec = build(tmp_path, eval_frac=0.3)
    train, held_out = prompts(spec.train_tasks()), prompts(spec.eval_tasks())
    assert set(train).isdisjoint(held_out)
    assert (len(train), len(held_out)) == (70, 30)


def test_the_split_depends_on_content_not_on_row_order_or_seed(tmp_path: Path) -> None:
    """k11"""
    save(tmp_path, rows(50))
    save(tmp_path, rows(50)[::-1], "reversed.jsonl")
    first = set(prompts(build(tmp_path).eval_tasks()))
    assert set(prompts(build(tmp_path, path="reversed.jsonl").eval_tasks())) == first
    other_seed = build_env_spec(
        DatasetConfig(path="d.jsonl", reward="exact"), seed=9, base_dir=tmp_path
    )
    assert set(prompts(other_seed.eval_tasks())) == first
    assert len(first) == 5


@pytest.mark.parametrize(("shared", "count"), [(3, 3), (8, 8)])
def test_prompts_in_both_files_are_counted_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, shared: int, count: int
) -> None:
    """k11: some shared prompts, or the same file twice."""
    save(tmp_path, rows(8))
    save(tmp_path, rows(8, start=8 - shared), "eval.jsonl")
    with caplog.at_level(logging.WARNING, logger="posttrain"):
        spec = build(tmp_path, eval_path="eval.jsonl")
    assert [f"{count} identical prompts" in r.getMessage() for r in caplog.records] == [True]
    assert (len(spec.train_tasks()), len(spec.eval_tasks())) == (8, 8)


def test_files_without_shared_prompts_give_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, rows(4))
    save(tmp_path, rows(4, start=4), "eval.jsonl")
    build(tmp_path, eval_path="eval.jsonl")
    assert not caplog.records


def test_num_eval_takes_an_unbiased_part_of_a_sorted_eval_file(tmp_path: Path) -> None:
    save(tmp_path, rows(4))
    save(tmp_path, rows(100, start=100), "eval.jsonl")
    spec = build(tmp_path, eval_path="eval.jsonl", num_eval=20)
    golds = [task.hidden.reveal()["answer"] for task in listed(spec.eval_tasks())]
    assert len(golds) == 20
    assert golds == sorted(golds)
    assert golds != list(range(100, 120))
    assert golds[-1] > 180


def test_a_template_makes_the_prompt_and_leaves_its_columns_to_the_reward(tmp_path: Path) -> None:
    save(tmp_path, [{"q": f"what is {{{i}}}", "answer": i} for i in range(4)])
    spec = build(tmp_path, template="{q}?\nUse \\boxed{{}}.", system="Think.")
    task = spec.train_tasks()[0]
    gold = task.hidden.reveal()["answer"]
    assert [(m.role, m.plain_text()) for m in task.prompt] == [
        ("system", "Think."),
        ("user", f"what is {{{gold}}}?\nUse \\boxed{{}}."),
    ]
    assert spec.columns == ("q", "answer")


def test_a_template_without_a_column_is_refused(tmp_path: Path) -> None:
    save(tmp_path, rows(4))
    with pytest.raises(ConfigError, match=r"has no \{column\}"):
        build(tmp_path, template="hello")


def test_a_templates_empty_column_is_an_empty_prompt(tmp_path: Path) -> None:
    """l11"""
    save(tmp_path, [{"q": " ", "answer": 1}, {"q": None, "answer": 1}, {"q": 0, "answer": 1}])
    with pytest.raises(DataError, match=r"2 of 3 .*1 x q is empty, 1 x q is null"):
        build(tmp_path, template="Solve: {q}")


def test_columns_are_those_that_every_task_has(tmp_path: Path) -> None:
    """A reward function must not be promised a column that some rows lack."""
    save(tmp_path, [{**row, **({"hint": "x"} if i else {})} for i, row in enumerate(rows(5))])
    assert build(tmp_path).columns == ("answer",)


def test_the_fingerprint_changes_with_the_gold_answer(tmp_path: Path) -> None:
    save(tmp_path, rows(2))
    save(tmp_path, [{**row, "answer": 9} for row in rows(2)], "other.jsonl")
    first, second = build(tmp_path), build(tmp_path, path="other.jsonl")
    assert first.train_tasks()[0].fingerprint != second.train_tasks()[0].fingerprint


def test_a_reward_function_whose_column_is_missing_fails_before_the_run(tmp_path: Path) -> None:
    """l07: the columns that tasks carry are those that the reward is checked against."""
    save(tmp_path, rows(4))
    (tmp_path / "grade.py").write_text("def f(completion, Answer): return 1.0\n")

    async def prepare() -> None:
        spec = build(tmp_path, reward="grade.py:f")
        reward = spec.reward()
        assert isinstance(reward, FunctionReward)
        try:
            await reward.prepare(spec.columns)
        finally:
            await reward.close()

    with pytest.raises(DataError, match=r"'Answer'.*did you mean answer"):
        asyncio.run(prepare())

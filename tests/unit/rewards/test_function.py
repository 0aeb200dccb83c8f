"""The user's reward function: what it may take, what it may return, how it may fail."""

from __future__ import annotations

import asyncio
import datetime
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.errors import ConfigError, DataError
from posttrain.rewards import FunctionReward, build_reward
from posttrain.types import (
    Completion,
    FinishReason,
    Hidden,
    Invalid,
    InvalidKind,
    Message,
    Observation,
    Scored,
    Task,
    Turn,
    Verdict,
)

SOURCE = """
import asyncio, os, subprocess, sys, time
from helper import SIGN

# One function, so that all tests share a pool: the completion says what to do.
async def reward(completion: str, answer, /, prompt: str, *, task, level=3, **others) -> float:
    if completion == "arguments":
        assert prompt == "1+1?" and task.id == "t1" and task.prompt == prompt
        assert answer == task.answer == task["answer"] == task.columns["answer"] == "2"
        assert level == 7 and others["source"] == "book" and "answer" not in others
        assert others["completions"] == ["first", "arguments"]
        assert [m["role"] for m in others["messages"]] == [
            "system", "user", "assistant", "user", "assistant"]
        assert others["messages"][3]["content"] == "go on"
        assert others["day"] == "2024-01-02" and others["scores"] == [1.0, 2.0]
        return SIGN
    if completion == "awaits":
        await asyncio.sleep(0)
        return 0.5
    if completion == "raises":
        raise ValueError("bad row")
    if completion == "asks task": return task.anwser
    if completion == "exits": sys.exit(0)
    if completion == "dies": os._exit(0)
    if completion == "hangs":
        while True: pass
    if completion == "grabs": return float(len(bytearray(10 * 2**30)))
    if completion == "prints":
        print("1.0"); os.write(1, b"noise"); return 1
    if completion == "reads": return 1.0 if sys.stdin.read() == "" else 0.0
    if completion == "counts":  return 5
    if completion == "dict": return {"reward": 1.0, "length": 7, "style": -0.5}
    return {
        "true": True, "nan": float("nan"), "inf": float("-inf"), "text": "1.0", "none": None,
        "list": [1.0], "huge": 10**400, "no reward": {"score": 1.0},
        "bad term": {"reward": 1.0, "style": None}, "pair": (1.0, 2.0),
    }[completion]

def by_chat(prompt: "list[dict]", completion): return float(prompt[-1]["content"] == "1+1?")
def needs_answer(completion, answer): return 1.0
class Judge: ...
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("user")
    (path / "grade.py").write_text(SOURCE)
    (path / "helper.py").write_text("SIGN = 1.0\n")
    return path


@pytest.fixture(scope="module")
def reward(folder: Path) -> Iterator[FunctionReward]:
    reward = FunctionReward("grade.py:reward", base_dir=folder, timeout_s=2.0)
    yield reward
    asyncio.run(reward.close())


def _turn(text: str, observation: Observation | None = None) -> Turn:
    completion = Completion.build([2], [-0.1], [0], FinishReason.EOS, text)
    return Turn(np.array([1], np.int32), completion, observation)


TASK = Task(
    "t1",
    (Message.text("system", "be brief"), Message.text("user", "1+1?")),
    Hidden({"answer": "2"}),
    {
        "level": 7,
        "source": "book",
        "day": datetime.date(2024, 1, 2),
        "scores": np.array([1.0, 2.0]),
    },
)


def score(reward: FunctionReward, text: str, task: Task = TASK) -> Verdict:
    turns: Sequence[Turn] = [
        _turn("first", Observation((Message.text("user", "go on"),))),
        _turn(text),
    ]
    return asyncio.run(reward.score(task, turns))


def prepare(spec: str, folder: Path, columns: list[str]) -> None:
    async def run() -> None:
        reward = FunctionReward(spec, base_dir=folder)
        try:
            await reward.prepare(columns)
        finally:
            await reward.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("arguments", 1.0),
        ("awaits", 0.5),
        ("true", 1.0),
        ("counts", 5.0),
        ("prints", 1.0),
        ("reads", 1.0),
    ],
)
def test_a_number_is_the_reward(reward: FunctionReward, text: str, value: float) -> None:
    verdict = score(reward, text)
    assert isinstance(verdict, Scored), verdict
    assert verdict.value == value and verdict.correct == (value >= 1.0)


def test_the_other_entries_of_a_dict_are_terms_without_weight(reward: FunctionReward) -> None:
    verdict = score(reward, "dict")
    assert isinstance(verdict, Scored) and verdict.value == 1.0
    assert [(t.name, t.value, t.weight) for t in verdict.terms] == [
        ("reward", 1.0, 1.0),
        ("length", 7.0, 0.0),
        ("style", -0.5, 0.0),
    ]


@pytest.mark.parametrize(
    ("text", "kind", "reason"),
    [
        ("nan", InvalidKind.REWARD_VALUE, "float nan"),
        ("inf", InvalidKind.REWARD_VALUE, "float -inf"),
        ("text", InvalidKind.REWARD_VALUE, "str '1.0'"),
        ("none", InvalidKind.REWARD_VALUE, "None"),
        ("list", InvalidKind.REWARD_VALUE, "list [1.0]"),
        ("pair", InvalidKind.REWARD_VALUE, "tuple (1.0, 2.0)"),
        ("huge", InvalidKind.REWARD_VALUE, "int 1000"),
        ("no reward", InvalidKind.REWARD_VALUE, "'score'"),
        ("bad term", InvalidKind.REWARD_VALUE, "'style'"),
        ("raises", InvalidKind.REWARD_ERROR, "ValueError: bad row"),
        ("asks task", InvalidKind.REWARD_ERROR, "did you mean answer?"),
        ("exits", InvalidKind.REWARD_ERROR, "SystemExit: 0"),
        ("dies", InvalidKind.GRADER_CRASH, "status 0"),
        ("grabs", InvalidKind.GRADER_CRASH, "out of memory"),
        ("hangs", InvalidKind.REWARD_TIMEOUT, "2 s"),
    ],
)
def test_no_verdict_is_invalid_and_the_next_grade_works(
    reward: FunctionReward, text: str, kind: InvalidKind, reason: str
) -> None:
    """Cases c17, c20, c21: errors, early exits and absent verdicts are never a reward of 0."""
    verdict = score(reward, text)
    assert isinstance(verdict, Invalid), verdict
    assert verdict.kind is kind and reason in verdict.reason
    after = score(reward, "counts")
    assert isinstance(after, Scored) and after.value == 5.0


def test_an_exception_names_the_line_of_the_users_file(
    reward: FunctionReward, folder: Path
) -> None:
    verdict = score(reward, "raises")
    line = 1 + SOURCE.splitlines().index('        raise ValueError("bad row")')
    assert isinstance(verdict, Invalid) and f"{folder / 'grade.py'}:{line}" in verdict.reason


def test_the_function_is_never_imported_here(reward: FunctionReward) -> None:
    assert isinstance(score(reward, "counts"), Scored)
    loaded = [name for name in sys.modules if name.startswith("_target_grade_")]
    assert not [*loaded, *({"grade", "helper"} & set(sys.modules))]


def test_an_annotated_prompt_comes_as_chat_messages(folder: Path) -> None:
    chat = FunctionReward("grade.py:by_chat", base_dir=folder, correct_at=2.0)
    verdict = score(chat, "")
    asyncio.run(chat.close())
    assert isinstance(verdict, Scored) and verdict.value == 1.0
    assert not verdict.correct  # correct_at decides, not the value


def test_a_column_that_json_cannot_hold_is_named(reward: FunctionReward) -> None:
    verdict = score(reward, "counts", Task("t", TASK.prompt, Hidden({"answer": object()})))
    assert isinstance(verdict, Invalid) and "column 'answer'" in verdict.reason


def test_prepare_accepts_a_function_whose_columns_are_there(folder: Path) -> None:
    prepare("grade.py:needs_answer", folder, ["question", "answer"])


def test_a_parameter_that_is_no_column_is_found_before_the_run(folder: Path) -> None:
    """Case l07: `answer` where the data says `Answer`."""
    with pytest.raises(DataError, match=r"'answer'.*columns are question, Answer.*mean Answer\?"):
        prepare("grade.py:needs_answer", folder, ["question", "Answer"])


def test_a_missing_column_found_late_is_invalid_not_0(folder: Path) -> None:
    late = FunctionReward("grade.py:needs_answer", base_dir=folder)
    verdict = score(late, "", Task("t", TASK.prompt, Hidden({"Answer": "2"})))
    asyncio.run(late.close())
    assert isinstance(verdict, Invalid) and verdict.kind is InvalidKind.REWARD_ERROR
    assert "did you mean Answer?" in verdict.reason


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere.py:reward", "no file .*nowhere.py"),
        ("grade.py:rewrad", "no function 'rewrad'; it defines reward, by_chat.*mean reward"),
        ("grade.py:SIGN", "no function but float"),
        ("grade.py:Judge", "no function but type"),
        ("broken.py:reward", r"(?s)broken.py\", line 2.*No module named 'no_such_package'"),
        ("syntax.py:reward", r"(?s)syntax.py\", line 1.*SyntaxError"),
        ("dying.py:reward", "status 7"),
        ("no_such_package.mod:reward", "No module named 'no_such_package'"),
    ],
)
def test_what_cannot_be_loaded_is_found_before_the_run(
    folder: Path, spec: str, message: str
) -> None:
    (folder / "broken.py").write_text("x = 1\nimport no_such_package\n")
    (folder / "syntax.py").write_text("def reward(:\n")
    (folder / "dying.py").write_text("import os\nos._exit(7)\n")
    with pytest.raises(ConfigError, match=message):
        prepare(spec, folder, [])


def test_a_module_of_the_recipes_folder_can_be_named(folder: Path) -> None:
    prepare("grade:needs_answer", folder, ["answer"])


@pytest.mark.parametrize("kind", ["maths", "exactly", "grade.py", "grade.py:"])
def test_an_unknown_kind_of_reward_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"env\.reward"):
        build_reward(kind, answer_column="answer", timeout_s=1.0, correct_at=1.0, base_dir=Path())


def test_a_relative_file_is_looked_for_beside_the_recipe_then_here(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.py").write_text("def reward(completion): return 1\n")
    prepare("here.py:reward", folder, [])


def test_grades_run_in_parallel_and_each_answer_gets_its_own(
    folder: Path, make_turn: Callable[[str], Turn]
) -> None:
    many: Any = build_reward(
        "grade.py:reward",
        answer_column="answer",
        timeout_s=20.0,
        correct_at=1.0,
        base_dir=folder,
        num_workers=2,
    )

    async def run() -> list[Verdict]:
        texts = ["counts", "awaits"] * 25
        try:
            return await asyncio.gather(*(many.score(TASK, [make_turn(t)]) for t in texts))
        finally:
            await many.close()

    values = [v.value if isinstance(v, Scored) else v for v in asyncio.run(run())]
    assert values == [5.0, 0.5] * 25

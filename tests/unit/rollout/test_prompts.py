"""Prompts at the limit: measured as they are sent, and treated as the setting says."""

from __future__ import annotations

import logging
from typing import Any, Literal

import pytest

from posttrain.data.tasks import TaskList, make_task, user_prompt
from posttrain.errors import DataError
from posttrain.rollout.prompts import fit_prompts
from posttrain.rollout.recorder import Recorder, Renderer
from posttrain.types import Observation

Rule = Literal["error", "drop", "truncate_left"]


@pytest.fixture
def renderer(renderers: dict[str, Renderer]) -> Renderer:
    return renderers["chatml_default_system"]


@pytest.fixture
def at_the_limit(renderer: Renderer) -> tuple[TaskList, int]:
    """Three tasks whose prompts have limit - 1, limit and limit + 1 tokens, system text and all."""
    tasks = TaskList(
        make_task(f"t{n}", user_prompt("Be brief.", "x" * n), {}, grader="none")
        for n in (40, 41, 42)
    )
    limit = len(renderer.prompt_ids(tasks[1].prompt))
    assert [len(renderer.prompt_ids(t.prompt)) - limit for t in tasks] == [-1, 0, 1]
    return tasks, limit


def fit(tasks: Any, renderer: Renderer, limit: int, rule: Rule) -> Any:
    return fit_prompts(tasks, renderer, limit, rule, "training tasks")


def test_one_token_too_many_is_an_error_with_the_numbers(
    renderer: Renderer, at_the_limit: tuple[TaskList, int]
) -> None:
    """l01, l03, l05"""
    tasks, limit = at_the_limit
    fact = (
        f"training tasks: 1 of 3 prompts exceed {limit} .*'t42', has {limit + 1}.*lower max_tokens"
    )
    with pytest.raises(DataError, match=fact):
        fit(tasks, renderer, limit, "error")
    assert fit(tasks, renderer, limit + 1, "error") is tasks


def test_drop_leaves_exactly_what_fits(
    renderer: Renderer, at_the_limit: tuple[TaskList, int], caplog: pytest.LogCaptureFixture
) -> None:
    """l03: filter and run measure the same prompt."""
    tasks, limit = at_the_limit
    with caplog.at_level(logging.WARNING, "posttrain"):
        kept = fit(tasks, renderer, limit, "drop")
    assert [kept[i].task_id for i in range(len(kept))] == ["t40", "t41"]
    assert "1 of 3 prompts exceed" in caplog.text and "dropped" in caplog.text
    for i in range(len(kept)):
        prompt = Recorder(renderer).begin(Observation(kept[i].prompt), max_prompt=limit)
        assert prompt.tolist() == renderer.prompt_ids(kept[i].prompt).tolist(), "sent uncut"


def test_dropping_everything_is_an_error(
    renderer: Renderer, at_the_limit: tuple[TaskList, int]
) -> None:
    with pytest.raises(DataError, match="3 of 3 .* leaves no task"):
        fit(at_the_limit[0], renderer, 5, "drop")


def test_truncating_keeps_every_task_and_the_end_of_its_prompt(
    renderer: Renderer, at_the_limit: tuple[TaskList, int]
) -> None:
    """l01: one truncated prompt everywhere."""
    tasks, limit = at_the_limit
    kept = fit(tasks, renderer, limit, "truncate_left")
    assert len(kept) == 3
    for task in tasks:
        whole = renderer.prompt_ids(task.prompt)
        prompt = Recorder(renderer).begin(Observation(task.prompt), max_prompt=limit)
        assert prompt.tolist() == whole[-limit:].tolist()
        assert len(prompt) == min(limit, len(whole))

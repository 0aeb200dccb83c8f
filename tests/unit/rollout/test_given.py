"""Given answers as token records: exactly what a sampler would have read and written."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.algo.builder import build_algorithm
from posttrain.config import DemonstrationsConfig, PairsConfig, PreferenceConfig, SftConfig
from posttrain.data.curriculum import UniformCurriculum
from posttrain.data.given import given_tasks
from posttrain.data.samples import build_batch, fingerprint
from posttrain.data.tasks import TaskList
from posttrain.errors import DataError, ModelError
from posttrain.journal import Journal, RunHeader
from posttrain.rollout.given import GivenProducer, check_given, given_group
from posttrain.rollout.recorder import Recorder, Renderer
from posttrain.types import Draw, Group, Task, TokenKind

HEADER = RunHeader({}, "0", {}, seed=0, threads=1, created_at="2026-01-01")
FAMILIES = ("chatml", "chatml_default_system", "llama3", "mistral", "gemma", "phi3", "zephyr")
TEXTS = ("ab12 ab", "1", " leading", "trailing ", "two\nlines\n", "ünïcode ✓", "a" * 30)


@pytest.fixture
def tasks(tmp_path: Path) -> Callable[..., list[Task]]:
    """All tasks of rows: tasks([("prompt", "answer")]) or of pairs."""

    def build(rows: list[tuple[str, ...]]) -> list[Task]:
        pairs = len(rows[0]) == 3
        names = ("prompt", "chosen", "rejected") if pairs else ("prompt", "completion")
        lines = [json.dumps(dict(zip(names, row, strict=True))) for row in rows]
        (tmp_path / "rows.jsonl").write_text("\n".join(lines))
        config = (PairsConfig if pairs else DemonstrationsConfig)(
            path="rows.jsonl", eval_path="rows.jsonl"
        )
        return given_tasks(config, tmp_path)[0]

    return build


def group_of(renderer: Renderer, task: Task, draw_id: int = 0) -> Group:
    return given_group(renderer, task, Draw(draw_id, task.task_id, 0, 5), 10_000)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", TEXTS)
def test_the_ids_are_those_of_a_sampler_that_said_the_same(
    family: str, text: str, renderers: Any, tokenizers: Any, say: Any, speak: Any, tasks: Any
) -> None:
    """The prompt as for a rollout, then the answer as the template writes it, then one end."""
    renderer, tokenizer = renderers[family], tokenizers[family]
    (member,) = group_of(renderer, tasks([("ab q", text)])[0])
    (row,) = member.sequences
    recorder = Recorder(renderer)
    prompt = recorder.begin(say("ab q"))
    assert row.token_ids[: len(prompt)].tolist() == prompt.tolist()
    answer = row.token_ids[len(prompt) :].tolist()
    written = renderer.text(
        [{"role": "user", "content": "ab q"}, {"role": "assistant", "content": text}], False
    )
    end = tokenizer.eos_token_id
    assert answer.count(end) == 1 and answer[-1] == end
    shown = tokenizer.decode(answer[:-1])
    assert shown.strip() == text.strip() and f"{shown}{tokenizer.eos_token}" in written
    if family in ("chatml", "phi3", "zephyr"):  # write the text as it is
        assert answer == speak(family, text).token_ids.tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_answer_and_end_of_turn_train_once_and_the_prompt_never(
    family: str, renderers: Any, tasks: Any
) -> None:
    group = group_of(renderers[family], tasks([("q", "ab12")])[0])
    (row,) = group.trajectories[0].sequences
    prompt = renderers[family].opening(tasks([("q", "ab12")])[0].prompt)[0]
    assert set(row.kinds[len(prompt) :]) == {int(TokenKind.DEMONSTRATION)}
    assert int(TokenKind.DEMONSTRATION) not in row.kinds[: len(prompt)]
    assert not row.loss_mask.any(), "a policy loss trains none of it"
    (sample,) = build_batch(1, [group], build_algorithm(SftConfig())).samples
    assert sample.loss_mask.tolist() == [i >= len(prompt) for i in range(len(row))]


@pytest.mark.parametrize("family", ["chatml", "llama3", "mistral", "gemma", "phi3"])
@pytest.mark.parametrize("position", ["{} b", "a{}b", "a {}"])
def test_special_tokens_in_the_text_of_an_answer_stay_text(
    family: str, position: str, renderers: Any, tokenizers: Any, tasks: Any
) -> None:
    """An end of turn that a row spells out neither ends the answer nor trains as one."""
    tokenizer = tokenizers[family]
    text = position.format(tokenizer.eos_token)
    (member,) = group_of(renderers[family], tasks([("q", text)])[0])
    ids = member.sequences[0].token_ids[member.sequences[0].trained_mask].tolist()
    assert [i for i in ids if i in tokenizer.all_special_ids] == [tokenizer.eos_token_id]
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids[:-1]).strip() == text.strip()


def test_a_template_that_rewrites_an_answered_prompt_is_refused(renderers: Any, tasks: Any) -> None:
    """Its generation prompt opens a thought that an answered turn does not have."""
    rows = tasks([("q", "a")])
    with pytest.raises(ModelError, match=r"writes another prompt.*template that only appends"):
        group_of(renderers["thinks_in_the_prompt"], rows[0])
    with pytest.raises(ModelError, match=r"writes another prompt"):
        check_given(renderers["thinks_in_the_prompt"], rows, 1000)


def test_rows_that_do_not_fit_are_all_refused_with_their_lines(renderers: Any, tasks: Any) -> None:
    rows = tasks([("q", "1"), ("q", "1 " * 40), ("q", "2"), ("q " * 50, "1")])
    check_given(renderers["chatml"], rows, 1000)
    with pytest.raises(DataError) as refused:
        check_given(renderers["chatml"], rows, 60)
    message = str(refused.value)
    assert "2 of 4 rows" in message and "line 2" in message and "line 4" in message
    assert "line 1" not in message and "model.max_context is 60" in message
    with pytest.raises(DataError, match=r"rows:2.*demonstration answer have .* holds 60"):
        given_group(renderers["chatml"], rows[1], Draw(0, "t", 0, 0), 60)


def test_a_pair_that_the_template_makes_equal_is_refused(renderers: Any, tasks: Any) -> None:
    rows = tasks([("q", "a", "a "), ("q", "a", "b")])
    check_given(renderers["chatml"], rows, 1000)
    with pytest.raises(DataError, match=r"line 1: chosen and rejected are the same tokens"):
        check_given(renderers["llama3"], rows, 1000)


def test_both_sides_of_a_pair_train_with_opposite_signs(renderers: Any, tasks: Any) -> None:
    group = group_of(renderers["chatml"], tasks([("q", "1", "2")])[0])
    assert [t.role for t in group] == ["chosen", "rejected"]
    batch = build_batch(1, [group], build_algorithm(PreferenceConfig()))
    signs = [set(s.streams["preference"][s.loss_mask].tolist()) for s in batch.samples]
    assert signs == [{1.0}, {-1.0}]


def test_given_groups_come_back_from_the_journal_as_they_went_in(
    renderers: Any, tasks: Any, tmp_path: Path
) -> None:
    group = group_of(renderers["chatml"], tasks([("q", "1 ab", "2")])[0])
    with Journal.create(tmp_path / "run", HEADER) as journal:
        journal.record_draw(group.draw)
        journal.record_group(group)
        again = journal.group(0)
    assert [(t.role, t.verdict, t.fingerprint) for t in again] == [
        (t.role, t.verdict, t.fingerprint) for t in group
    ]
    for mine, theirs in zip(group, again, strict=True):
        for name in ("token_ids", "kinds", "sampler_logprobs", "policy_versions"):
            left, right = getattr(mine.sequences[0], name), getattr(theirs.sequences[0], name)
            assert np.array_equal(left, right)


class Rig:
    """A producer of the rows over a journal on disk."""

    def __init__(self, renderer: Renderer, rows: list[Task], journal: Journal) -> None:
        open_draws = [
            (draw, journal.group(draw.draw_id) if has_group else None)
            for draw, has_group in journal.open_draws()
        ]
        self.journal = journal
        self.algorithm = build_algorithm(SftConfig())
        self.producer = GivenProducer(
            renderer,
            UniformCurriculum(TaskList(rows), seed=3),
            journal,
            max_tokens=1000,
            groups_per_step=3,
            next_draw_id=journal.next_draw_id(),
            open_draws=open_draws,
        )

    def take(self, step: int) -> list[str]:
        groups = asyncio.run(self.producer.take(step - 1))
        batch = build_batch(step, groups, self.algorithm)
        self.journal.begin_step(batch, fingerprint(batch))
        return [group.draw.task_id for group in groups]


def test_every_row_trains_exactly_once_an_epoch(renderers: Any, tasks: Any, tmp_path: Path) -> None:
    rows = tasks([(f"p{i}", "a") for i in range(7)])
    with Journal.create(tmp_path / "run", HEADER) as journal:
        producer = Rig(renderers["chatml"], rows, journal).producer
        taken = [g.draw for _ in range(7) for g in asyncio.run(producer.take(0))]
    assert [d.draw_id for d in taken] == list(range(21))
    for epoch in range(3):
        drawn = Counter(d.task_id for d in taken if d.epoch == epoch)
        assert drawn == Counter(t.task_id for t in rows)


def test_a_producer_that_died_at_any_call_goes_on_with_the_same_rows(
    renderers: Any, tasks: Any, tmp_path: Path
) -> None:
    rows = tasks([(f"p{i}", "a") for i in range(7)])
    with Journal.create(tmp_path / "whole", HEADER) as journal:
        whole = Rig(renderers["chatml"], rows, journal).take(1)
    for method in ("record_draw", "record_group"):
        for nth in (1, 2, 3):
            folder = tmp_path / f"{method}-{nth}"
            with Journal.create(folder, HEADER) as journal:
                rig = Rig(renderers["chatml"], rows, journal)
                _die_after(journal, method, nth)
                with pytest.raises(KeyboardInterrupt):
                    rig.take(1)
            with Journal.open(folder) as journal:
                assert Rig(renderers["chatml"], rows, journal).take(1) == whole
                ledger = journal.ledger()
                assert (ledger.drawn, ledger.trained, ledger.open) == (3, 3, 0)


def _die_after(journal: Journal, method: str, nth: int) -> None:
    original, calls = getattr(journal, method), 0

    def dying(*args: Any) -> None:
        nonlocal calls
        original(*args)
        calls += 1
        if calls == nth:
            raise KeyboardInterrupt

    setattr(journal, method, dying)

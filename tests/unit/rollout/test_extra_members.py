"""Members of a group beside its siblings: they serve it and count in none of its statistics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from posttrain.algo.builder import build_algorithm
from posttrain.config import GrpoConfig, ReverseConfig, RlooConfig
from posttrain.config.estimators import RemaxConfig
from posttrain.data.samples import build_batch
from posttrain.data.tasks import make_task, user_prompt
from posttrain.envs.reverse import ReverseSpec
from posttrain.errors import ConfigError
from posttrain.journal import Journal, RunHeader
from posttrain.rollout.episode import EpisodeLimits, EpisodeRunner
from posttrain.rollout.recorder import Renderer
from posttrain.types import (
    Completion,
    Draw,
    FinishReason,
    Group,
    Invalid,
    InvalidKind,
    SamplingParams,
    Scored,
    StopReason,
    Task,
    Trajectory,
    Turn,
)

HEADER = RunHeader({}, "0", {}, seed=0, threads=1, created_at="2026-01-01")
LIMITS = EpisodeLimits(4, 1000, 1000, None, timeout_s=60.0, max_attempts=1)
SPEC = ReverseSpec(ReverseConfig(alphabet="ab12", length=2, num_eval=8))
BROKEN = Invalid(InvalidKind.ENV_ERROR, "broke")


@dataclass
class Saying:
    """Answers with the given texts in turn; the greedy request gets its own."""

    renderer: Renderer
    texts: list[str]
    greedy: str = "zz"
    temperatures: list[float] = field(default_factory=list)

    async def generate(self, token_ids: Any, params: SamplingParams, seed: int) -> Completion:
        self.temperatures.append(params.temperature)
        text = self.texts.pop(0) if params.temperature else self.greedy
        ids = [*self.renderer.encode(text), *self.renderer.eos_token_ids]
        count = len(ids)
        return Completion.build(ids, [-0.5] * count, [3] * count, FinishReason.EOS, text)


@pytest.fixture
def play(renderers: dict[str, Renderer]) -> Callable[..., Group]:
    """A group of the first training task: play(["ab", "ba"], {"hindsight"})."""

    def build(texts: list[str], extras: set[str], spec: Any = SPEC, greedy: str = "zz") -> Group:
        renderer = renderers["chatml"]
        sampler = Saying(renderer, list(texts), greedy)
        runner = EpisodeRunner(spec, None, sampler, renderer, LIMITS)  # type: ignore[arg-type]
        task = SPEC.train_tasks()[0]
        draw = Draw(5, task.task_id, 0, 11)
        params = SamplingParams(8, temperature=1.0)
        group = asyncio.run(runner.group(task, draw, len(texts), params, extras))
        assert sampler.temperatures.count(0.0) == ("greedy" in extras)
        return group

    return build


@pytest.fixture
def group(make: SimpleNamespace) -> Callable[..., Group]:
    """Siblings with these rewards, and a greedy member with this verdict if there is one."""

    def member(index: int, verdict: Any, role: str, draw_id: int) -> Trajectory:
        completion = make.completion([10 + index, 2], version=7)
        turn = Turn(np.array([1, 5], np.int32), completion)
        row = make.sequence([1, 5], completion)
        return Trajectory(
            draw_id, index, 0, (turn,), (row,), verdict, StopReason.TERMINATED, role=role
        )

    def build(rewards: list[Any], greedy: Any = None, draw_id: int = 0) -> Group:
        verdicts = [Scored(r) if isinstance(r, float) else r for r in rewards]
        members = [member(i, v, "", draw_id) for i, v in enumerate(verdicts)]
        if greedy is not None:
            verdict = Scored(greedy) if isinstance(greedy, float) else greedy
            members.append(member(len(members), verdict, "greedy", draw_id))
        return Group(Draw(draw_id, "t", 0, 0), tuple(members))

    return build


# --- the greedy member ----------------------------------------------------------------------------


def test_the_greedy_answer_is_sampled_without_chance_beside_the_siblings(play: Any) -> None:
    played = play(["ab", "ba", "11"], {"greedy"}, greedy="1a")
    assert [t.role for t in played] == ["", "", "", "greedy"]
    assert [t.sample_index for t in played] == [0, 1, 2, 3]
    assert played.trajectories[3].turns[0].completion.text == "1a"


def test_the_greedy_answer_is_the_baseline_and_never_trains(group: Any) -> None:
    batch = build_batch(1, [group([1.0, 0.0], greedy=0.75)], build_algorithm(RemaxConfig()))
    weights = {s.sample_index: s.streams["policy"][-1] for s in batch.samples}
    assert weights == {0: 0.25, 1: -0.75}


def test_the_greedy_answer_is_in_no_metric(group: Any) -> None:
    algorithm = build_algorithm(RemaxConfig())
    with_good = algorithm.credit([group([1.0, 0.0], greedy=1.0)]).metrics
    with_bad = algorithm.credit([group([1.0, 0.0], greedy=BROKEN)]).metrics
    plain = build_algorithm(RlooConfig()).credit([group([1.0, 0.0])]).metrics
    assert with_good == plain
    for name in ("reward/mean", "accuracy/train", "response/len_mean", "reward/std"):
        assert with_bad[name] == plain[name]
    assert with_bad["trajectories/invalid_frac"] == 0


@pytest.mark.parametrize("config", [RlooConfig(), GrpoConfig()])
def test_extra_members_change_no_advantage_of_other_algorithms(config: Any, group: Any) -> None:
    algorithm = build_algorithm(config)
    plain = algorithm.credit([group([1.0, 0.0, 0.5])]).streams
    assert algorithm.credit([group([1.0, 0.0, 0.5], greedy=1.0)]).streams == plain


def test_a_group_without_a_scored_greedy_answer_is_dropped_as_invalid(group: Any) -> None:
    """A failure is data: the run goes on, and the group is counted."""
    groups = [group([1.0, 0.0], greedy=BROKEN), group([1.0, 0.0], greedy=0.5, draw_id=1)]
    credit = build_algorithm(RemaxConfig()).credit(groups)
    assert credit.dropped == {0: "invalid"} and {key[0] for key in credit.streams} == {1}
    assert credit.metrics["groups/invalid_frac"] == 0.5


def test_a_group_generated_without_a_greedy_answer_is_an_error_that_says_so(group: Any) -> None:
    with pytest.raises(ConfigError, match=r"draw 0 was generated without a greedy answer"):
        build_algorithm(RemaxConfig()).credit([group([1.0, 0.0])])


# --- staleness ------------------------------------------------------------------------------------


def test_a_member_that_sampled_nothing_hides_no_lag(group: Any) -> None:
    """The oldest token of a group says how stale it is, whatever failed before it said a word."""
    played = group([1.0, 0.0])
    mute = replace(played.trajectories[0], turns=(), sequences=(), sample_index=9, verdict=BROKEN)
    assert Group(played.draw, (*played.trajectories, mute)).min_policy_version == 7
    assert Group(played.draw, (mute,)).min_policy_version == -1


def test_a_relabelled_member_hides_no_lag(play: Any) -> None:
    played = play(_training_answers(), {"hindsight"})
    assert any(t.role == "hindsight" for t in played)
    assert played.min_policy_version == 3


# --- hindsight ------------------------------------------------------------------------------------


def test_a_failed_answer_becomes_a_demonstration_of_the_task_it_solves(
    play: Any, renderers: dict[str, Renderer]
) -> None:
    said = _training_answers()
    played = play(said, {"hindsight"})
    relabelled = [t for t in played if t.role == "hindsight"]
    failed = [t for t in played.siblings if not t.verdict.correct]
    assert len(relabelled) == len(failed) > 0
    for demonstration, sibling in zip(relabelled, failed, strict=True):
        completion = sibling.turns[0].completion
        (row,) = demonstration.sequences
        assert row.token_ids[row.trained_mask].tolist() == completion.token_ids.tolist()
        task = SPEC.relabel(SPEC.train_tasks()[0], sibling.turns)
        prompt = renderers["chatml"].opening(task.prompt)[0]
        assert row.token_ids[: len(prompt)].tolist() == prompt
        assert demonstration.fingerprint == task.fingerprint and not row.loss_mask.any()
        assert task.hidden.reveal()["answer"] == completion.text


def test_a_held_out_task_is_never_a_relabelled_one(play: Any) -> None:
    held_out = {t.task_id for t in (SPEC.eval_tasks()[i] for i in range(8))}
    letters = [a + b for a in "ab12" for b in "ab12"]
    solved = {text: SPEC.relabel(TASK, _turns(text)) for text in letters}
    assert {t.task_id for t in solved.values() if t} == {
        t.task_id for t in (SPEC.train_tasks()[i] for i in range(8))
    }
    assert not {t.task_id for t in solved.values() if t} & held_out
    refused = [text for text, task in solved.items() if task is None]
    assert len(refused) == 8
    assert [t for t in play(refused[:3], {"hindsight"}) if t.role == "hindsight"] == []


def test_what_solves_no_task_is_not_relabelled(play: Any) -> None:
    played = play(["a", "abc", "zz", ""], {"hindsight"})
    assert [t.role for t in played] == [""] * 4


def test_hindsight_trains_in_its_own_stream_and_leaves_the_groups_advantages(play: Any) -> None:
    said = _training_answers()
    plain, more = play(said, set()), play(said, {"hindsight"})
    without = build_algorithm(RlooConfig()).credit([plain])
    with_it = build_algorithm(RlooConfig(hindsight_coef=0.5)).credit([more])
    assert with_it.metrics == without.metrics
    policy = {key: own for key, own in with_it.streams.items() if "policy" in own}
    assert policy == without.streams
    rest = [own for key, own in with_it.streams.items() if key not in policy]
    assert rest and all(set(own) == {"hindsight"} for own in rest)
    batch = build_batch(1, [more], build_algorithm(RlooConfig(hindsight_coef=0.5)))
    for sample in batch.samples:
        carried = "hindsight" if sample.policy_versions.max() < 0 else "policy"
        assert set(sample.streams) == {carried}


def test_a_group_that_failed_as_a_whole_still_teaches_what_its_answers_solve(play: Any) -> None:
    """Equal rewards teach no preference; that is where hindsight has most to say."""
    wrong = _training_answers()[1]
    played = play([wrong, wrong], {"hindsight"})
    plain = build_algorithm(RlooConfig()).credit([played])
    assert plain.dropped == {5: "zero_variance"} and plain.streams == {}
    credit = build_algorithm(RlooConfig(hindsight_coef=0.5)).credit([played])
    assert credit.dropped == {} and credit.flat == {5}
    assert [set(own) for own in credit.streams.values()] == [{"hindsight"}] * 2


def test_greedy_and_relabelled_members_are_numbered_apart(play: Any) -> None:
    played = play(_training_answers(), {"greedy", "hindsight"}, greedy="1a")
    assert [t.sample_index for t in played] == list(range(len(played)))
    assert [t.role for t in played][-3] == "greedy"


def test_extra_members_come_back_from_the_journal_as_they_went_in(
    play: Any, tmp_path: Path
) -> None:
    played = play(_training_answers(), {"greedy", "hindsight"})
    with Journal.create(tmp_path / "run", HEADER) as journal:
        journal.record_draw(played.draw)
        journal.record_group(played)
        again = journal.group(played.draw.draw_id)
    algorithm = build_algorithm(RlooConfig(hindsight_coef=1.0))
    before, after = build_batch(1, [played], algorithm), build_batch(1, [again], algorithm)
    assert [t.role for t in again] == [t.role for t in played]
    for mine, theirs in zip(before.samples, after.samples, strict=True):
        assert np.array_equal(mine.token_ids, theirs.token_ids)
        assert mine.streams.keys() == theirs.streams.keys()
        for name in mine.streams:
            assert np.array_equal(mine.streams[name], theirs.streams[name])


def test_a_relabel_that_raises_costs_its_demonstration_and_nothing_else(
    play: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Raising:
        name = "raising"
        make = staticmethod(SPEC.make)

        def relabel(self, task: Task, turns: Any) -> Task:
            raise RuntimeError("no idea")

    played = play(_training_answers(), {"hindsight"}, spec=Raising())
    assert [t.role for t in played] == ["", "", ""]
    assert "no idea" in caplog.text


TASK = make_task("t", user_prompt(None, "q"), {}, grader="none")


def _turns(text: str) -> tuple[Turn, ...]:
    completion = Completion.build([5], [-0.1], [0], FinishReason.EOS, text)
    return (Turn(np.array([1], np.int32), completion),)


def _training_answers() -> list[str]:
    """The right answer of the first training task, and those of two others."""
    return [SPEC.train_tasks()[i].hidden.reveal()["answer"] for i in range(3)]

"""Episodes: a failure is data at one boundary, and it never takes its siblings with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from posttrain.data.tasks import make_task, user_prompt
from posttrain.errors import EngineError
from posttrain.rollout.episode import EpisodeLimits, EpisodeRunner
from posttrain.types import (
    Completion,
    Draw,
    FinishReason,
    Group,
    Invalid,
    InvalidKind,
    Message,
    Observation,
    SamplingParams,
    Scored,
    StepOutcome,
    StopReason,
    Task,
    Trajectory,
    Turn,
    Verdict,
)

TASK = make_task("t", user_prompt(None, "q"), {"answer": "x"}, grader="none")
DRAW = Draw(3, "t", 0, 99)
LIMITS = EpisodeLimits(
    max_turns=4,
    max_context=10_000,
    max_prompt=10_000,
    cut_prompt_to=None,
    timeout_s=60.0,
    max_attempts=1,
)
GOING = StepOutcome(Observation((Message.text("user", "again"),)))
WON = StepOutcome(None, terminated=True, verdict=Scored(1.0))


class EchoSampler:
    """Answers every prompt; the third value of each entry may be an error to raise."""

    def __init__(self, reasons: Sequence[FinishReason | Exception] = ()) -> None:
        self._reasons = list(reasons)
        self.seeds: list[int] = []

    async def generate(self, token_ids: Any, params: Any, seed: int) -> Completion:
        self.seeds.append(seed)
        await asyncio.sleep(0)
        how = self._reasons.pop(0) if self._reasons else FinishReason.EOS
        if isinstance(how, Exception):
            raise how
        return Completion.build([5, 6], [-0.1, -0.2], [0, 0], how, "ab")


@dataclass
class ScriptedEnv:
    """Plays outcomes in turn; an exception is raised, a coroutine function awaited first."""

    script: Sequence[Any]
    on_close: Any = None
    closed: int = 0
    steps: int = 0

    async def reset(self, seed: int) -> Observation:
        self.seed = seed
        return Observation(TASK.prompt)

    async def step(self, turn: Turn) -> StepOutcome:
        what = self.script[min(self.steps, len(self.script) - 1)]
        self.steps += 1
        return await perform(what)

    async def close(self) -> None:
        self.closed += 1
        if self.on_close is not None:
            await perform(self.on_close)


async def perform(what: Any) -> Any:
    if isinstance(what, BaseException):
        raise what
    return await what() if callable(what) else what


async def hang() -> StepOutcome:
    await asyncio.Event().wait()
    raise AssertionError


@dataclass
class ScriptedSpec:
    """Episode i gets script i (the last one for all further ones)."""

    scripts: Sequence[Any]
    on_close: Any = None
    made: list[ScriptedEnv] = field(default_factory=list)
    name: str = "scripted"

    def make(self, task: Task) -> ScriptedEnv:
        script = self.scripts[min(len(self.made), len(self.scripts) - 1)]
        if isinstance(script, Exception):
            self.made.append(ScriptedEnv([]))
            raise script
        self.made.append(ScriptedEnv(script, self.on_close))
        return self.made[-1]


class FixedReward:
    def __init__(self, verdict: Any) -> None:
        self._verdict = verdict

    async def score(self, task: Task, turns: Sequence[Turn]) -> Verdict:
        return await perform(self._verdict)

    async def close(self) -> None: ...


@pytest.fixture
def play(renderers: Any) -> Callable[..., Trajectory]:
    """One trajectory of a scripted environment."""

    def run(spec: Any, *, sampler: Any = None, reward: Any = None, **limits: Any) -> Trajectory:
        runner = EpisodeRunner(
            spec, reward, sampler or EchoSampler(), renderers["chatml"], replace(LIMITS, **limits)
        )
        return asyncio.run(runner.trajectory(TASK, DRAW, 0, SamplingParams(4)))

    return run


# --- how an episode ends --------------------------------------------------------------------------


def test_the_environments_end_and_verdict_are_the_trajectorys(play: Any) -> None:
    spec = ScriptedSpec([[GOING, WON]])
    t = play(spec)
    assert (t.verdict, t.stop_reason, len(t.turns)) == (Scored(1.0), StopReason.TERMINATED, 2)
    assert (t.draw_id, t.sample_index, t.attempts, spec.made[0].closed) == (3, 0, 1, 1)
    assert t.num_sampled_tokens == 4


def test_a_reward_judges_what_the_environment_does_not(play: Any) -> None:
    ended = StepOutcome(None, truncated=True)
    t = play(ScriptedSpec([[ended]]), reward=FixedReward(Scored(0.5)))
    assert (t.verdict, t.stop_reason) == (Scored(0.5), StopReason.ENV_TRUNCATED)


def test_running_out_of_turns_is_judged_and_marked(play: Any) -> None:
    t = play(ScriptedSpec([[GOING]]), reward=FixedReward(Scored(0.0)), max_turns=3)
    assert (len(t.turns), t.stop_reason, t.truncated) == (3, StopReason.MAX_TURNS, True)
    assert t.verdict == Scored(0.0)


@pytest.mark.parametrize(
    ("finish", "stop"),
    [
        (FinishReason.LENGTH, StopReason.LENGTH),
        (FinishReason.CONTEXT, StopReason.CONTEXT),
        (FinishReason.STOP_STRING, StopReason.TERMINATED),
    ],
)
def test_a_truncated_answer_is_still_given_to_the_environment(
    finish: FinishReason, stop: StopReason, play: Any
) -> None:
    spec = ScriptedSpec([[WON]])
    t = play(spec, sampler=EchoSampler([finish]))
    assert (t.verdict, t.stop_reason, spec.made[0].steps) == (Scored(1.0), stop, 1)


def test_a_conversation_that_fills_the_context_ends_before_the_next_turn(play: Any) -> None:
    t = play(ScriptedSpec([[GOING]]), reward=FixedReward(Scored(0.0)), max_context=60)
    assert (t.stop_reason, t.verdict) == (StopReason.CONTEXT, Scored(0.0))
    assert 1 <= len(t.turns) < 4
    assert all(len(turn.prompt_token_ids) < 60 for turn in t.turns)


# --- failures -------------------------------------------------------------------------------------

NO_REWARD = StepOutcome(None, terminated=True)


@pytest.mark.parametrize(
    ("script", "sampler", "reward", "kind", "reason"),
    [
        (ValueError("make"), None, None, InvalidKind.ENV_ERROR, "ValueError: make"),
        ([KeyError("k")], None, None, InvalidKind.ENV_ERROR, "KeyError: 'k'"),
        ([TimeoutError("socket")], None, None, InvalidKind.ENV_ERROR, "TimeoutError: socket"),
        ([NO_REWARD], None, None, InvalidKind.ENV_ERROR, "without a verdict and has no reward"),
        (
            [NO_REWARD],
            None,
            FixedReward(Invalid(InvalidKind.REWARD_ERROR, "boom")),
            InvalidKind.REWARD_ERROR,
            "boom",
        ),
        ([WON], EchoSampler([EngineError("gone")]), None, InvalidKind.ENGINE_ERROR, "gone"),
        ([WON], EchoSampler([FinishReason.ABORT]), None, InvalidKind.ABORTED, "aborted"),
    ],
    ids=["make", "step", "timeout inside", "no reward", "reward", "engine", "abort"],
)
def test_a_failure_is_invalid_with_its_own_kind_never_a_reward(
    script: Any, sampler: Any, reward: Any, kind: InvalidKind, reason: str, play: Any
) -> None:
    spec = ScriptedSpec([script])
    t = play(spec, sampler=sampler, reward=reward)
    assert isinstance(t.verdict, Invalid)
    assert t.verdict.kind is kind and reason in t.verdict.reason
    assert t.stop_reason in (StopReason.FAILED, StopReason.ABORTED, StopReason.TERMINATED)
    if not isinstance(script, Exception):
        assert spec.made[0].closed == 1, "a failed environment is closed too"


@pytest.mark.parametrize(
    ("where", "kind"),
    [("step", InvalidKind.ENV_TIMEOUT), ("reward", InvalidKind.REWARD_TIMEOUT)],
)
def test_what_hangs_is_cut_off_at_the_deadline_wherever_it_hangs(
    where: str, kind: InvalidKind, play: Any
) -> None:
    """e02"""
    spec = ScriptedSpec([[hang] if where == "step" else [NO_REWARD]])
    t = play(spec, reward=FixedReward(hang), timeout_s=0.02)
    assert isinstance(t.verdict, Invalid)
    assert t.verdict.kind is kind and t.verdict.retryable
    assert "0.02 s" in t.verdict.reason
    assert spec.made[0].closed == 1


@pytest.mark.parametrize("closing", [hang, ValueError("boom")], ids=["hangs", "raises"])
def test_what_an_environment_does_at_its_end_does_not_take_back_its_verdict(
    closing: Any, play: Any
) -> None:
    spec = ScriptedSpec([[WON]], on_close=closing)
    t = play(spec, timeout_s=0.02, max_attempts=2)
    assert t.verdict == Scored(1.0) and len(spec.made) == 1


def test_waiting_for_the_engine_does_not_count_towards_an_episodes_deadline(play: Any) -> None:
    """A queue in front of the engine would otherwise favour short answers."""

    class SlowSampler(EchoSampler):
        async def generate(self, *args: Any) -> Any:
            await asyncio.sleep(0.1)
            return await super().generate(*args)

    t = play(ScriptedSpec([[GOING, WON]]), sampler=SlowSampler(), timeout_s=0.05)
    assert t.verdict == Scored(1.0)


def test_a_reward_that_raises_or_gives_no_verdict_is_not_the_environments_failure(
    play: Any,
) -> None:
    for given, kind in (
        (ValueError("boom"), InvalidKind.REWARD_ERROR),
        (0.5, InvalidKind.REWARD_VALUE),
    ):
        t = play(ScriptedSpec([[NO_REWARD]]), reward=FixedReward(given), max_attempts=3)
        assert isinstance(t.verdict, Invalid) and t.verdict.kind is kind
        assert t.attempts == 1


def test_one_that_hangs_in_step_and_again_in_close_is_cut_off_all_the_same(play: Any) -> None:
    """e02: the deadline was used up when close began."""
    t = play(ScriptedSpec([[hang]], on_close=hang), timeout_s=0.02)
    assert isinstance(t.verdict, Invalid) and t.verdict.kind is InvalidKind.ENV_TIMEOUT


@pytest.mark.parametrize("bad", [ValueError("boom"), hang], ids=["raises", "hangs"])
def test_siblings_of_a_failed_episode_are_finished(bad: Any, renderers: Any) -> None:
    """e02: the group completes, with the failure in its place."""
    spec = ScriptedSpec([[WON], [bad], [WON], [WON]])
    limits = replace(LIMITS, timeout_s=0.5 if bad is hang else 60.0)
    runner = EpisodeRunner(spec, None, EchoSampler(), renderers["chatml"], limits)
    group: Group = asyncio.run(runner.group(TASK, DRAW, 4, SamplingParams(4)))
    assert [isinstance(t.verdict, Scored) for t in group] == [True, False, True, True]
    assert [t.sample_index for t in group] == [0, 1, 2, 3] and len(group.valid) == 3


# --- retries --------------------------------------------------------------------------------------


def test_a_passing_failure_is_tried_again_in_a_fresh_environment_with_the_same_seed(
    play: Any,
) -> None:
    spec = ScriptedSpec([[ValueError("flaky")], [GOING, WON]])
    sampler = EchoSampler()
    t = play(spec, sampler=sampler, max_attempts=3)
    assert (t.verdict, t.attempts, len(spec.made)) == (Scored(1.0), 2, 2)
    assert [env.closed for env in spec.made] == [1, 1]
    assert spec.made[0].seed == spec.made[1].seed
    assert sampler.seeds[0] == sampler.seeds[1] != sampler.seeds[2]
    assert len(t.turns) == 2, "nothing of the failed attempt is left"


def test_attempts_end_with_the_last_failure(play: Any) -> None:
    spec = ScriptedSpec([[ValueError("always")]])
    t = play(spec, max_attempts=3)
    assert (t.attempts, len(spec.made)) == (3, 3)
    assert isinstance(t.verdict, Invalid) and "always" in t.verdict.reason


def test_a_failure_that_cannot_pass_is_not_tried_again(play: Any) -> None:
    spec = ScriptedSpec([[NO_REWARD]])
    reward = FixedReward(Invalid(InvalidKind.REWARD_VALUE, "nan", retryable=False))
    assert play(spec, reward=reward, max_attempts=3).attempts == 1


def test_siblings_and_turns_have_seeds_of_their_own(renderers: Any) -> None:
    sampler = EchoSampler()
    runner = EpisodeRunner(
        ScriptedSpec([[GOING, GOING, WON]]), None, sampler, renderers["chatml"], LIMITS
    )
    group = asyncio.run(runner.group(TASK, DRAW, 4, SamplingParams(4)))
    assert len(set(sampler.seeds)) == 12 and len({t.seed for t in group}) == 4


def test_cancelling_is_not_a_failure_and_closes_the_environment(renderers: Any) -> None:
    spec = ScriptedSpec([[hang]])
    runner = EpisodeRunner(spec, None, EchoSampler(), renderers["chatml"], LIMITS)

    async def scenario() -> None:
        task = asyncio.create_task(runner.trajectory(TASK, DRAW, 0, SamplingParams(4)))
        while not (spec.made and spec.made[0].steps):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert spec.made[0].closed == 1


def test_what_a_failed_episode_sampled_before_is_recorded_exactly(play: Any) -> None:
    t = play(ScriptedSpec([[GOING, ValueError("late")]]))
    assert len(t.turns) == 2 and t.num_sampled_tokens == 4
    assert np.isfinite(t.sequences[0].sampler_logprobs).all()

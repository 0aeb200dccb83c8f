"""One episode, and a group of them. A failure ends as an `Invalid` verdict, never an exception."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from posttrain.errors import EngineError
from posttrain.protocols import Env, EnvSpec, Reward, Sampler
from posttrain.randomness import derive_seed
from posttrain.rollout.deadline import Budget, OutOfTimeError, within
from posttrain.rollout.recorder import Recorder, Renderer
from posttrain.telemetry.spans import lane, span
from posttrain.types import (
    Draw,
    FinishReason,
    Group,
    Invalid,
    InvalidKind,
    SamplingParams,
    Scored,
    StopReason,
    Task,
    TokenKind,
    TokenSequence,
    Trajectory,
    Verdict,
)

_STOPS = {
    FinishReason.LENGTH: StopReason.LENGTH,
    FinishReason.CONTEXT: StopReason.CONTEXT,
    FinishReason.ABORT: StopReason.ABORTED,
}

MAX_CLOSE_S = 10.0
"""An environment that hangs while it closes must not hold its group: the episode's own deadline
may have passed by then."""


logger = logging.getLogger("posttrain")


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Checked in this order: room in the context before a turn; after it the environment's own end
    (a truncated answer is still given to it), then turns. `timeout_s` is the environment's time."""

    max_turns: int
    max_context: int
    max_prompt: int
    cut_prompt_to: int | None
    timeout_s: float
    max_attempts: int


class EpisodeRunner:
    """Runs episodes of one environment against one sampler."""

    def __init__(
        self,
        spec: EnvSpec,
        reward: Reward | None,
        sampler: Sampler,
        renderer: Renderer,
        limits: EpisodeLimits,
    ) -> None:
        self._spec = spec
        self._reward = reward
        self._sampler = sampler
        self._renderer = renderer
        self._limits = limits

    async def group(
        self,
        task: Task,
        draw: Draw,
        group_size: int,
        params: SamplingParams,
        extras: Set[str] = frozenset(),
    ) -> Group:
        """All siblings of a draw, concurrently.

        `extras` asks for members beside them: "greedy", one answer without chance; "hindsight",
        for each failed answer of one turn the demonstration that it is under the task it solves,
        where the environment names one.
        """
        episodes = [self.trajectory(task, draw, i, params) for i in range(group_size)]
        if "greedy" in extras:
            greedy = replace(params, temperature=0.0)
            episodes.append(self.trajectory(task, draw, group_size, greedy))
        members = list(await asyncio.gather(*episodes))
        if "greedy" in extras:
            members[group_size] = replace(members[group_size], role="greedy")
        if "hindsight" in extras:
            members += self._hindsight(task, members[:group_size], len(members))
        return Group(draw, tuple(members))

    def _hindsight(
        self, task: Task, siblings: Sequence[Trajectory], first_index: int
    ) -> list[Trajectory]:
        """Failed answers as demonstrations of the tasks that they solve."""
        demonstrations: list[Trajectory] = []
        for sibling in siblings:
            failed = isinstance(sibling.verdict, Scored) and not sibling.verdict.correct
            solved = self._solved(task, sibling) if failed and len(sibling.turns) == 1 else None
            if solved is not None:
                index = first_index + len(demonstrations)
                demonstrations.append(self._relabelled(solved, sibling, index))
        return demonstrations

    def _solved(self, task: Task, sibling: Trajectory) -> Task | None:
        """The task that an answer solves. A recipe is refused whose environment has no relabel."""
        try:
            return self._spec.relabel(task, sibling.turns)  # type: ignore[attr-defined]
        except Exception as error:  # boundary: recorded in the run's log; the sibling stays
            logger.warning("task %s: relabelling an answer failed: %r", task.task_id, error)
            return None

    def _relabelled(self, solved: Task, sibling: Trajectory, index: int) -> Trajectory:
        prompt_ids, prompt_kinds = self._renderer.opening(solved.prompt)
        said = sibling.turns[0].completion.token_ids
        count = len(prompt_ids) + len(said)
        kinds = [*prompt_kinds, *[int(TokenKind.DEMONSTRATION)] * len(said)]
        return replace(
            sibling,
            sample_index=index,
            turns=(),
            sequences=(
                TokenSequence.build(
                    [*prompt_ids, *said.tolist()], kinds, [0.0] * count, [-1] * count
                ),
            ),
            verdict=Scored(1.0, evidence=f"sibling {sibling.sample_index} solves this task"),
            fingerprint=solved.fingerprint,
            role="hindsight",
        )

    async def trajectory(
        self, task: Task, draw: Draw, sample_index: int, params: SamplingParams
    ) -> Trajectory:
        """One sibling; a retryable failure is tried again in a fresh environment.

        Every attempt has the same seed: a retry repeats the draw, it does not draw again.
        """
        attempt = 1
        while True:
            with (
                lane("episode"),
                span("episode", draw=draw.draw_id, sample=sample_index, attempt=attempt),
            ):
                result = await self._attempt(task, draw, sample_index, params, attempt)
            verdict = result.verdict
            again = isinstance(verdict, Invalid) and verdict.retryable
            if not again or attempt >= self._limits.max_attempts:
                return result
            attempt += 1

    async def _attempt(
        self, task: Task, draw: Draw, sample_index: int, params: SamplingParams, attempt: int
    ) -> Trajectory:
        recorder = Recorder(self._renderer)
        seed = derive_seed(draw.seed, "episode", sample_index)
        stop = StopReason.FAILED
        verdict: Verdict
        try:
            stop, verdict = await self._play(task, seed, recorder, params)
        except EngineError as error:
            verdict = Invalid(InvalidKind.ENGINE_ERROR, str(error))
        except OutOfTimeError:
            stop = StopReason.TIMEOUT
            verdict = Invalid(
                InvalidKind.ENV_TIMEOUT,
                f"the environment took more than rollout.episode_timeout_s = "
                f"{self._limits.timeout_s:g} s",
                retryable=True,
            )
        except (Exception, SystemExit) as error:  # boundary: the environment's failure is data
            verdict = Invalid(
                InvalidKind.ENV_ERROR, f"{type(error).__name__}: {error}", retryable=True
            )
        return Trajectory(
            draw_id=draw.draw_id,
            sample_index=sample_index,
            seed=seed,
            turns=recorder.turns,
            sequences=recorder.sequences(),
            verdict=verdict,
            stop_reason=stop,
            attempts=attempt,
            fingerprint=task.fingerprint,
        )

    async def _play(
        self, task: Task, seed: int, recorder: Recorder, params: SamplingParams
    ) -> tuple[StopReason, Verdict]:
        env = self._spec.make(task)
        budget = Budget(self._limits.timeout_s)
        standing: Verdict | None = None
        try:
            with span("environment: reset"):
                observation = await budget.spend(env.reset(derive_seed(seed, "env")))
            prompt = recorder.begin(observation, self._limits.cut_prompt_to)
            if len(prompt) > self._limits.max_prompt:
                return StopReason.FAILED, Invalid(
                    InvalidKind.ENV_ERROR,
                    f"the prompt has {len(prompt)} tokens, room is for {self._limits.max_prompt}; "
                    'set rollout.overlong_prompt = "truncate_left" or shorten it',
                )
            for turn_index in range(self._limits.max_turns):
                if turn_index:
                    prompt = recorder.observe(observation)
                    if len(prompt) >= self._limits.max_context:
                        return StopReason.CONTEXT, await self._judge(task, recorder, standing)
                turn_seed = derive_seed(seed, "turn", turn_index)
                with span("generation", turn=turn_index, prompt_tokens=len(prompt)):
                    completion = await self._sampler.generate(prompt, params, turn_seed)
                turn = recorder.sampled(completion)
                if completion.finish_reason is FinishReason.ABORT:
                    return StopReason.ABORTED, Invalid(
                        InvalidKind.ABORTED, "the request was aborted", retryable=True
                    )
                with span("environment: step", turn=turn_index, tokens=len(completion)):
                    outcome = await budget.spend(env.step(turn))
                standing = outcome.verdict or standing
                recorder.rewarded(outcome.reward)
                stop = _STOPS.get(completion.finish_reason)
                if outcome.terminated or outcome.truncated or stop is StopReason.CONTEXT:
                    if stop is None:
                        ended = outcome.terminated
                        stop = StopReason.TERMINATED if ended else StopReason.ENV_TRUNCATED
                    return stop, await self._judge(task, recorder, standing)
                assert outcome.observation is not None
                observation = outcome.observation
            return StopReason.MAX_TURNS, await self._judge(task, recorder, standing)
        finally:
            await self._close(env, task)

    async def _close(self, env: Env, task: Task) -> None:
        """What an environment does at its end no longer changes the verdict."""
        try:
            await within(min(MAX_CLOSE_S, self._limits.timeout_s), env.close())
        except Exception as error:  # boundary: recorded in the run's log
            logger.warning("task %s: closing its environment failed: %r", task.task_id, error)

    async def _judge(self, task: Task, recorder: Recorder, standing: Verdict | None) -> Verdict:
        """The environment's newest verdict, else the reward's."""
        if standing is not None:
            return standing
        if self._reward is None:
            return Invalid(
                InvalidKind.ENV_ERROR,
                f"environment {self._spec.name} ended without a verdict and has no reward; give a "
                "verdict with each StepOutcome that a limit may make the last",
            )
        try:
            with span("grading"):
                verdict = await within(
                    self._limits.timeout_s, self._reward.score(task, recorder.turns)
                )
        except (OutOfTimeError, TimeoutError):
            return Invalid(
                InvalidKind.REWARD_TIMEOUT,
                f"the reward gave no verdict in {self._limits.timeout_s:g} s",
                retryable=True,
            )
        except Exception as error:  # boundary: the reward's failure is data
            return Invalid(InvalidKind.REWARD_ERROR, f"{type(error).__name__}: {error}")
        if not isinstance(verdict, Scored | Invalid):
            return Invalid(InvalidKind.REWARD_VALUE, f"the reward gave {verdict!r}, no verdict")
        return verdict

"""THE loop over scripted parts: a sampler that reads a script, a learner that only hashes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain import loop
from posttrain.algo.builder import build_algorithm
from posttrain.config import ReverseConfig, RlooConfig
from posttrain.data.curriculum import UniformCurriculum
from posttrain.envs.reverse import ReverseSpec
from posttrain.errors import EngineError, ReplayMismatchError, RolloutError
from posttrain.evaluation.evaluator import Evaluator
from posttrain.evaluation.schedule import EvaluationSchedule
from posttrain.journal import Journal, RunHeader
from posttrain.rollout.episode import EpisodeLimits, EpisodeRunner
from posttrain.rollout.producer import RolloutProducer
from posttrain.rollout.recorder import Renderer
from posttrain.telemetry.observer import SilentObserver
from posttrain.training.checkpoints import CheckpointStore
from posttrain.types import Completion, FinishReason, Int32, SamplingParams, StepResult, TrainBatch

NUM_STEPS, GROUPS, GROUP_SIZE, SEED = 3, 2, 3, 7
EOS = 0
HEADER = RunHeader({}, "0.1.0", {}, seed=SEED, threads=1, created_at="2026-01-01T00:00:00Z")


@pytest.fixture(autouse=True)
def _no_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here loses power, and a flush takes longer than all the rest."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(
        "posttrain.journal.journal.set_durable", lambda c, _: c.execute("PRAGMA synchronous = OFF")
    )


class Crash(Exception):
    """The process is gone."""


@dataclass
class Trace:
    """Every call at a boundary, in order; raises Crash before or after the one that it is told."""

    calls: list[tuple[str, Any]] = field(default_factory=list)
    crash_at: int = -1
    after: bool = False

    def wrap(self, owner: object, name: str, label: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        def traced(*args: Any, **kwargs: Any) -> Any:
            mine = len(self.calls) == self.crash_at
            self.calls.append((name, label(*args)))
            if mine and not self.after:
                raise Crash
            result = original(*args, **kwargs)
            if mine:
                raise Crash
            return result

        setattr(owner, name, traced)


class CharTokenizer:
    """One token a character; a message is its role, its text and a line break."""

    chat_template = "scripted"
    is_fast = True

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], tokenize: bool, add_generation_prompt: bool
    ) -> str:
        text = "".join(f"{m['role'][0]}:{m['content']}\n" for m in messages)
        return text + ("a:" if add_generation_prompt else "")

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        spans = [(i, i + 1) for i in range(len(text))]
        return {"input_ids": [ord(c) for c in text], "offset_mapping": spans}

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(c) for c in text]


class HashLearner:
    """Its weights are a hash over every batch it has seen."""

    def __init__(self) -> None:
        self.policy_version = 0
        self.weights = "initial"
        self.memory: dict[str, float] = {}

    def step(self, batch: TrainBatch) -> StepResult:
        assert batch.step == self.policy_version + 1
        seen = [
            (s.draw_id, s.token_ids.tolist(), s.streams["policy"].tolist()) for s in batch.samples
        ]
        self.weights = hashlib.sha256(repr((self.weights, seen)).encode()).hexdigest()
        self.policy_version = batch.step
        return StepResult(batch.step, batch.step, self.weights, {"learner/loss": 0.0})

    def weights_hash(self) -> str:
        return self.weights

    def save(self, folder: Path) -> None:
        (folder / "learner.json").write_text(json.dumps([self.policy_version, self.weights]))

    def restore(self, folder: Path) -> None:
        self.policy_version, self.weights = json.loads((folder / "learner.json").read_text())


class ScriptedSampler:
    """Writes letters that follow from weights and seed, some turns of the event loop later."""

    def __init__(self, learner: HashLearner) -> None:
        self._learner = learner
        self.version = -1

    async def generate(self, token_ids: Int32, params: SamplingParams, seed: int) -> Completion:
        key = f"{self._learner.weights}/{seed}/{token_ids.tolist()}"
        script = hashlib.sha256(key.encode()).digest()
        letters = ["ab"[byte % 2] for byte in script[: params.max_tokens - 1]]
        versions = []
        for _ in range(len(letters) + 1):
            versions.append(self.version)
            for _ in range(1 + script[-1] % 3):
                await asyncio.sleep(0)
        ids = [*map(ord, letters), EOS]
        logprobs = np.full(len(ids), -0.7)
        return Completion.build(ids, logprobs, versions, FinishReason.EOS, "".join(letters))

    async def load_weights(self, version: int) -> None:
        self.version = version

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def abort(self) -> None: ...

    def stats(self) -> Mapping[str, float]:
        return {"sampler/tokens": 1.0}


class Told(SilentObserver):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.evaluations: list[int] = []

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(step)

    def evaluation(self, policy_version: int, report: Mapping[str, Any]) -> None:
        self.evaluations.append(policy_version)


def build_parts(journal: Journal, learner: HashLearner, lag: int) -> loop.Parts:
    spec = ReverseSpec(ReverseConfig(alphabet="ab", length=3, num_eval=2))
    sampler = ScriptedSampler(learner)
    sampler.version = learner.policy_version
    limits = EpisodeLimits(1, 64, 32, None, timeout_s=60.0, max_attempts=1)
    runner = EpisodeRunner(spec, None, sampler, Renderer(CharTokenizer(), [EOS]), limits)
    open_draws = [
        (draw, journal.group(draw.draw_id) if has_group else None)
        for draw, has_group in journal.open_draws()
    ]
    params = SamplingParams(max_tokens=4)
    return loop.Parts(
        num_steps=NUM_STEPS,
        max_invalid_frac=0.5,
        max_skipped_steps=3,
        learner=learner,
        sampler=sampler,
        algorithm=build_algorithm(RlooConfig()),
        rollouts=RolloutProducer(
            runner,
            UniformCurriculum(spec.train_tasks(), SEED),
            journal,
            params,
            groups_per_step=GROUPS,
            group_size=GROUP_SIZE,
            max_policy_lag=lag,
            num_steps=NUM_STEPS,
            next_draw_id=journal.next_draw_id(),
            open_draws=open_draws,
        ),
        evaluator=Evaluator(runner, spec.eval_tasks(), params, 2, 2, SEED),
        schedule=EvaluationSchedule(NUM_STEPS, every=2, before=True, after=True),
        journal=journal,
        checkpoints=CheckpointStore(journal.run_dir, journal, every=2, keep=1),
        observer=Told(),
    )


def watch(parts: loop.Parts, trace: Trace) -> None:
    journal = parts.journal
    trace.wrap(journal, "record_draw", lambda draw: draw.draw_id)
    trace.wrap(journal, "record_group", lambda group: group.draw.draw_id)
    trace.wrap(journal, "begin_step", lambda batch, _: batch.step)
    trace.wrap(journal, "finish_step", lambda result: result.step)
    trace.wrap(journal, "record_eval_group", lambda version, _: version)
    trace.wrap(journal, "record_evaluation", lambda version, _: version)
    trace.wrap(journal, "record_checkpoint", lambda step, *_: step)
    trace.wrap(parts.learner, "step", lambda batch: batch.step)


async def go_on(journal: Journal, lag: int, trace: Trace) -> loop.Parts:
    """What a process does with a run directory: restore, redo, run."""
    learner = HashLearner()
    store = CheckpointStore(journal.run_dir, journal, every=2, keep=1)
    store.clean()
    store.restore_newest(learner)
    if loop.redo(journal, learner, build_algorithm(RlooConfig())):
        store.after_step(learner, NUM_STEPS)
    parts = build_parts(journal, learner, lag)
    watch(parts, trace)
    try:
        await loop.run(parts)
    finally:
        await parts.rollouts.close()
    return parts


def start(run_dir: Path, lag: int, trace: Trace) -> loop.Parts:
    fresh = not (run_dir / "journal.sqlite").exists()
    with Journal.create(run_dir, HEADER) if fresh else Journal.open(run_dir) as journal:
        return asyncio.run(go_on(journal, lag, trace))


def state(run_dir: Path) -> tuple[Any, ...]:
    """What the journal says in the end."""
    with Journal.open(run_dir, readonly=True) as journal:
        steps = journal.steps()
        assert all(s.finished for s in steps)
        return (
            [(s.step, s.draw_ids, dict(s.dropped), s.fingerprint, s.weights_hash) for s in steps],
            journal.ledger(),
            [(e.policy_version, e.report) for e in journal.evaluations()],
            journal.checkpoints(),
        )


@pytest.mark.parametrize("lag", [0, 2])
def test_groups_are_journalled_before_a_step_takes_them_and_the_step_before_it_moves_weights(
    lag: int, tmp_path: Path
) -> None:
    trace = Trace()
    parts = start(tmp_path / "run", lag, trace)
    assert parts.learner.policy_version == NUM_STEPS
    with Journal.open(tmp_path / "run", readonly=True) as journal:
        taken = {s.step: s.draw_ids for s in journal.steps()}
        assert journal.ledger().balanced and journal.ledger().drawn == NUM_STEPS * GROUPS
    place = {call: index for index, call in enumerate(trace.calls)}
    for step in range(1, NUM_STEPS + 1):
        order = [place[name, step] for name in ("begin_step", "step", "finish_step")]
        assert order == list(range(order[0], order[0] + 3)), "nothing comes between them"
        for draw_id in taken[step]:
            assert place["record_draw", draw_id] < place["record_group", draw_id] < order[0]


def test_without_a_lag_rollouts_and_training_alternate(tmp_path: Path) -> None:
    trace = Trace()
    start(tmp_path / "run", 0, trace)
    names = [name for name, _ in trace.calls if "eval" not in name and "checkpoint" not in name]
    one_step = ["record_draw"] * GROUPS + ["record_group"] * GROUPS
    assert names == [*one_step, "begin_step", "step", "finish_step"] * NUM_STEPS


def test_with_a_lag_rollouts_run_ahead_as_far_as_the_bound(tmp_path: Path) -> None:
    trace = Trace()
    start(tmp_path / "run", 2, trace)
    first_step = trace.calls.index(("begin_step", 1))
    assert [d for name, d in trace.calls[:first_step] if name == "record_draw"] == [*range(6)]
    with Journal.open(tmp_path / "run", readonly=True) as journal:
        lags = [
            s.step - 1 - min(journal.group(d).min_policy_version for d in s.draw_ids)
            for s in journal.steps()
        ]
    assert max(lags) == 2


def test_a_crash_at_any_boundary_changes_nothing(tmp_path: Path) -> None:
    trace = Trace()
    start(tmp_path / "whole", 0, trace)
    whole = state(tmp_path / "whole")
    last = len(trace.calls) - 1
    for index in range(last + 1):  # before each call is after the one before it
        run_dir = tmp_path / f"crash-{index}"
        with pytest.raises(Crash):
            start(run_dir, 0, Trace(crash_at=index, after=index == last))
        start(run_dir, 0, Trace())
        assert state(run_dir) == whole, f"crash at {trace.calls[index]}"


def test_a_crash_with_rollouts_in_flight_loses_and_repeats_no_draw(tmp_path: Path) -> None:
    trace = Trace()
    start(tmp_path / "whole", 2, trace)
    used = [step[1] for step in state(tmp_path / "whole")[0]]
    for index in range(0, len(trace.calls), 2):
        run_dir = tmp_path / f"crash-{index}"
        with pytest.raises(Crash):
            start(run_dir, 2, Trace(crash_at=index))
        start(run_dir, 2, Trace())
        steps, ledger, evaluations, _ = state(run_dir)
        assert [step[1] for step in steps] == used
        assert ledger.balanced and ledger.open == 0
        assert [version for version, _ in evaluations] == [0, 2, 3]


def test_every_evaluation_is_pinned_to_the_version_it_is_labelled_with(tmp_path: Path) -> None:
    """k07: rollouts of other versions are in flight, and weights change between evaluations."""
    parts = start(tmp_path / "run", 2, Trace())
    assert isinstance(parts.observer, Told)
    assert parts.observer.evaluations == [0, 2, 3]
    with Journal.open(tmp_path / "run", readonly=True) as journal:
        for record in journal.evaluations():
            assert record.report["policy_version"] == record.policy_version
            for group in journal.eval_groups(record.policy_version):
                for trajectory in group:
                    for turn in trajectory.turns:
                        versions = set(turn.completion.policy_versions.tolist())
                        assert versions == {record.policy_version}


def test_a_version_that_jumps_over_an_evaluation_is_evaluated_once_as_itself() -> None:
    """k06: versions 24 -> 26 with an evaluation every 25."""
    schedule = EvaluationSchedule(num_steps=100, every=25, before=True, after=True)
    done: set[int] = set()
    for version in (0, 10, 24, 26, 27, 49, 50, 51, 74, 80, 99, 100):
        if schedule.due(version, done):
            done.add(version)
    assert sorted(done) == [0, 26, 50, 80, 100]


def test_an_evaluation_is_not_repeated_by_a_resumed_run(tmp_path: Path) -> None:
    trace = Trace()
    start(tmp_path / "run", 0, trace)
    again = Trace()
    start(tmp_path / "run", 0, again)
    assert again.calls == []


def test_a_redo_of_other_settings_names_the_step(tmp_path: Path) -> None:
    start(tmp_path / "run", 0, Trace())
    other = build_algorithm(RlooConfig(zero_variance="keep"))
    with (
        Journal.open(tmp_path / "run", readonly=True) as journal,
        pytest.raises(ReplayMismatchError, match=r"step \d: .*settings changed"),
    ):
        loop.redo(journal, HashLearner(), other)


def test_a_redo_to_a_step_stops_there(tmp_path: Path) -> None:
    start(tmp_path / "run", 0, Trace())
    learner = HashLearner()
    algorithm = build_algorithm(RlooConfig())
    with Journal.open(tmp_path / "run", readonly=True) as journal:
        assert loop.redo(journal, learner, algorithm, up_to=2) == 2
        assert learner.weights == journal.steps()[1].weights_hash
        assert loop.redo(journal, learner, algorithm, up_to=1) == 0
        assert loop.redo(journal, learner, algorithm) == 1


def test_most_episodes_failing_stops_the_run_and_drops_their_draws(tmp_path: Path) -> None:
    with Journal.create(tmp_path / "run", HEADER) as journal:
        parts = build_parts(journal, HashLearner(), 0)
        parts.schedule = EvaluationSchedule(NUM_STEPS, every=0, before=False, after=False)

        async def fail(*_: Any) -> Completion:
            raise EngineError("no memory left")

        parts.sampler.generate = fail  # type: ignore[method-assign]
        with pytest.raises(RolloutError, match=r"engine_error: no memory left.*--resume"):
            asyncio.run(loop.run(parts))
        ledger = journal.ledger()
    assert (ledger.drawn, ledger.trained, dict(ledger.dropped)) == (2, 0, {"invalid": 2})

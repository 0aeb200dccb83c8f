"""Whole steps of our own: a run as `posttrain train` makes it, watched from outside.

Texts are prompts as they are, and no sequence ends early: the run gets a folder with the same
weights, a chat template that adds nothing, and no end of sequence.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from transformers import AutoTokenizer

from posttrain.benchmarks.prompts import exact_texts
from posttrain.benchmarks.report import Measure, Report
from posttrain.benchmarks.work import ModelSize, Work, grpo_step
from posttrain.config import (
    CheckpointConfig,
    DatasetConfig,
    EvalConfig,
    GrpoConfig,
    LearnerConfig,
    ModelConfig,
    OptimConfig,
    Recipe,
    RolloutConfig,
    SamplerConfig,
)
from posttrain.errors import BenchmarkError
from posttrain.run import train
from posttrain.telemetry.observer import SilentObserver

_REWARD = '''"""Noise: siblings differ, so that no group is without signal."""

import zlib


def reward(completion: str) -> float:
    return zlib.crc32(completion.encode()) / 2**32
'''
_PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_ENDS = {
    "config.json": "eos_token_id",
    "generation_config.json": "eos_token_id",
    "tokenizer_config.json": "eos_token",
}
_NUM_EVAL_TEXTS = 4
_LAST = 1
"""The last step of a run also writes a checkpoint, so one more is made and not counted."""


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What a step works on. `new_tokens` are sampled for every sequence, neither more nor less."""

    prompts: int
    group_size: int
    prompt_tokens: int
    new_tokens: int

    @property
    def num_sequences(self) -> int:
        return self.prompts * self.group_size


@dataclass(frozen=True, slots=True)
class OurStep:
    """Wall seconds from the end of the former step, and the loop's own metrics."""

    wall_s: float
    metrics: Mapping[str, float]


@dataclass
class OurSteps:
    """`prepare`, then `run`. `max_tokens` are those of a micro-batch."""

    sizes: StepSizes
    folder: Path
    dtype: Literal["bfloat16", "float32"]
    max_tokens: int
    threads: int
    num_steps: int
    texts: Sequence[str] = field(default=(), init=False)
    _work_dir: Path = field(default=Path(), init=False)

    def prepare(self, work_dir: Path) -> None:
        """Write folder, texts and reward into a folder of this run's own, below `work_dir`."""
        self._work_dir = work_dir / f"{self.sizes.prompts}-{self.sizes.prompt_tokens}"
        self._work_dir.mkdir()
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        count = self.sizes.prompts * (self.num_steps + _LAST)  # no step meets a former one's
        texts = exact_texts(tokenizer, count + _NUM_EVAL_TEXTS, self.sizes.prompt_tokens)
        self.texts, held_out = texts[:count], texts[count:]
        _write_rows(self._work_dir / "train.jsonl", self.texts)
        _write_rows(self._work_dir / "eval.jsonl", held_out)
        (self._work_dir / "reward.py").write_text(_REWARD, encoding="utf-8")
        write_endless_model(self.folder, self._work_dir / "model")

    def run(self, between: Callable[[int], None] = lambda _: None) -> list[OurStep]:
        """All steps; `between` is called after each with its number, and its time is in none.

        Raises the BenchmarkError that `between` raised, once the run has ended.
        """
        watch = _Watch(between, self.num_steps)
        run_dir = self._work_dir / "run"
        asyncio.run(train(self._recipe(), self._work_dir, run_dir, resume=False, observer=watch))
        if watch.failure is not None:
            raise watch.failure
        return watch.steps

    def least_work(self) -> dict[str, Work]:
        """Of one step, rollout and learner."""
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        prompts = [
            np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32)
            for text in self.texts[: self.sizes.prompts]
        ]
        size = ModelSize.of_folder(self.folder, self.dtype)
        works = grpo_step(size, prompts, self.sizes.group_size, self.sizes.new_tokens)
        return dict(zip(("rollout", "learner"), works, strict=True))

    def _recipe(self) -> Recipe:
        sizes = self.sizes
        return Recipe(
            name="steps",
            num_steps=self.num_steps + _LAST,
            threads=self.threads,
            model=ModelConfig(path=str(self._work_dir / "model"), dtype=self.dtype),
            env=DatasetConfig(
                path="train.jsonl", eval_path="eval.jsonl", reward="reward.py:reward"
            ),
            rollout=RolloutConfig(groups_per_step=sizes.prompts, group_size=sizes.group_size),
            sampler=SamplerConfig(max_tokens=sizes.new_tokens, max_batch=sizes.num_sequences),
            algo=GrpoConfig(),
            optim=OptimConfig(lr=1e-6),
            learner=LearnerConfig(max_tokens_per_microbatch=self.max_tokens),
            eval=EvalConfig(before=False, after=False, num_tasks=_NUM_EVAL_TEXTS),
            checkpoint=CheckpointConfig(every=1_000_000),
        )


class _Watch(SilentObserver):
    """Notes the wall time of steps."""

    def __init__(self, between: Callable[[int], None], num_steps: int) -> None:
        self._between, self._num_steps = between, num_steps
        self._last = time.perf_counter()
        self.steps: list[OurStep] = []
        self.failure: BenchmarkError | None = None

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        if step > self._num_steps or self.failure is not None:
            return
        self.steps.append(OurStep(time.perf_counter() - self._last, dict(metrics)))
        try:
            self._between(step)
        except BenchmarkError as error:  # a run goes on whatever its observer raises
            self.failure = error
        self._last = time.perf_counter()


def write_endless_model(folder: Path, target: Path) -> None:
    """The same weights with a template that adds nothing to a text, and without an end."""
    target.mkdir()
    for file in folder.iterdir():
        if file.suffix == ".safetensors":
            (target / file.name).symlink_to(file.resolve())
        elif file.is_file():
            shutil.copy(file, target / file.name)
    (target / "chat_template.jinja").write_text(_PLAIN_TEMPLATE, encoding="utf-8")
    for name, end in _ENDS.items():
        path = target / name
        if path.exists():
            settings = json.loads(path.read_text(encoding="utf-8"))
            settings.pop("chat_template", None)  # the file beside it is read
            settings[end] = None  # left out, it would be the architecture's default
            path.write_text(json.dumps(settings), encoding="utf-8")


def _write_rows(path: Path, texts: Sequence[str]) -> None:
    rows = (json.dumps({"prompt": text}) + "\n" for text in texts)
    path.write_text("".join(rows), encoding="utf-8")


def add_steps(report: Report, name: str, sizes: StepSizes, steps: Sequence[OurStep]) -> Measure:
    """Wall time of steps and its two large parts. Every step must have sampled all its tokens."""
    for step in steps:
        sampled = step.metrics["sampler/tokens"]
        if sampled != sizes.num_sequences * sizes.new_tokens:
            raise BenchmarkError(
                f"{name}: {sampled:.0f} tokens were sampled in a step, not "
                f"{sizes.num_sequences * sizes.new_tokens}: look why sequences ended early"
            )
    wall = report.add(name, "s", [s.wall_s for s in steps])
    for part in ("rollout", "learner"):
        report.add(f"  {name}: {part}", "s", [s.metrics[f"time/{part}_s"] for s in steps])
    worst = max(step.metrics["mismatch/abs_max"] for step in steps)
    report.notes.append(f"{name}: largest difference of sampler and learner log-probs {worst:g}")
    return wall

"""What the journal answers with: small frozen records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from posttrain.types import Draw, Group, Scored


class DrawStatus(StrEnum):
    """Every draw is in exactly one of these."""

    OPEN = "open"
    TRAINED = "trained"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class RunHeader:
    """What a run was started with: everything needed to repeat it.

    `recipe` is the resolved recipe as JSON values, `packages` maps a distribution to its version,
    `threads` is the number of compute threads, `created_at` an ISO 8601 time.

    Example:
        >>> RunHeader({"num_steps": 2}, "0.1.0", {"numpy": "2.4.6"}, seed=0, threads=1,
        ...           created_at="2026-01-01T00:00:00Z").recipe["num_steps"]
        2
    """

    recipe: Mapping[str, Any]
    code_version: str
    packages: Mapping[str, str]
    seed: int
    threads: int
    created_at: str


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """What lists need of a group without reading its arrays.

    `reward_mean` is over valid trajectories and None when there is none; the policy versions are
    those of the oldest and the newest sampled token, -1 when nothing was sampled.

    Example:
        >>> GroupSummary(8, 7, 320, 3, 4, 0.5).num_valid
        7
    """

    num_trajectories: int
    num_valid: int
    num_sampled_tokens: int
    min_policy_version: int
    max_policy_version: int
    reward_mean: float | None

    @classmethod
    def of(cls, group: Group) -> GroupSummary:
        """Counted from the turns: every sampled token is in exactly one completion."""
        versions = [turn.completion.policy_versions for t in group for turn in t.turns]
        versions_C = np.concatenate(versions) if versions else np.empty(0, np.int32)
        rewards = [t.verdict.value for t in group if isinstance(t.verdict, Scored)]
        return cls(
            num_trajectories=len(group),
            num_valid=len(rewards),
            num_sampled_tokens=len(versions_C),
            min_policy_version=int(versions_C.min()) if len(versions_C) else -1,
            max_policy_version=int(versions_C.max(initial=-1)),
            reward_mean=sum(rewards) / len(rewards) if rewards else None,
        )


@dataclass(frozen=True, slots=True)
class DrawRecord:
    """A draw and what became of it: the step that consumed it, the reason it was dropped.

    Example:
        >>> DrawRecord(Draw(0, "t", 0, 1), DrawStatus.TRAINED, 3, None, None).step
        3
    """

    draw: Draw
    status: DrawStatus
    step: int | None
    reason: str | None
    group: GroupSummary | None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step: the exact batch it took and, once finished, what it gave.

    `draw_ids` are in batch order, those in `dropped` included. `batch_metrics` came with the
    batch, `metrics` with the result; `weights_hash`, `policy_version` are None until finished.

    Example:
        >>> StepRecord(1, (0, 1), {1: "zero_variance"}, "ab", {}, True, "cd", 1, None, {}).trained
        (0,)
    """

    step: int
    draw_ids: tuple[int, ...]
    dropped: Mapping[int, str]
    fingerprint: str
    batch_metrics: Mapping[str, float]
    finished: bool
    weights_hash: str | None
    policy_version: int | None
    skipped: str | None
    metrics: Mapping[str, float]

    @property
    def trained(self) -> tuple[int, ...]:
        return tuple(d for d in self.draw_ids if d not in self.dropped)


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """A checkpoint that may be restored: its step, its folder as given, the hash of its state.

    Example:
        >>> CheckpointRecord(5, "checkpoints/step-5", "ab").step
        5
    """

    step: int
    folder: str
    state_hash: str


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """The report of one evaluation.

    Example:
        >>> EvaluationRecord(0, {"accuracy": 0.25}).report["accuracy"]
        0.25
    """

    policy_version: int
    report: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EventRecord:
    """Something that happened: an alarm, a restart, a repair. `at_s` is Unix time in seconds.

    Example:
        >>> EventRecord(1, "alarm", {"metric": "policy/lag_max"}, 0.0).kind
        'alarm'
    """

    event_id: int
    kind: str
    payload: Mapping[str, Any]
    at_s: float


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where every draw went.

    Example:
        >>> Ledger(drawn=5, trained=2, dropped={"zero_variance": 1}, open=2).balanced
        True
    """

    drawn: int
    trained: int
    dropped: Mapping[str, int]
    open: int

    @property
    def balanced(self) -> bool:
        """Whether no draw is lost or counted twice."""
        return self.drawn == self.trained + sum(self.dropped.values()) + self.open

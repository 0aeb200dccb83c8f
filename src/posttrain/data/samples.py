"""Scored groups -> one training batch. A pure function, so that a redo gives the same bits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from posttrain.algo.credit import Credit, Memory, Streams, TurnWeights
from posttrain.types import Bool, Float32, Group, Int32, TrainBatch, TrainSample, Trajectory


class CreditSource(Protocol):
    """What `build_batch` needs of an algorithm."""

    def credit(self, groups: Sequence[Group], memory: Memory | None = None) -> Credit: ...


def build_batch(
    step: int,
    groups: Sequence[Group],
    algorithm: CreditSource,
    memory: Memory | None = None,
) -> TrainBatch:
    """Every trainable token of every credited trajectory enters exactly once.

    `memory` is what the algorithm remembers between steps, and is brought up to date.
    """
    credit = algorithm.credit(groups, memory)
    samples = [
        sample
        for group in groups
        if group.draw.draw_id not in credit.dropped
        for trajectory in group
        for sample in _samples_of(
            trajectory, credit.streams.get((trajectory.draw_id, trajectory.sample_index))
        )
    ]
    return TrainBatch(
        step=step,
        samples=tuple(samples),
        draw_ids=tuple(group.draw.draw_id for group in groups),
        dropped=dict(credit.dropped),
        metrics=dict(credit.metrics),
    )


def _samples_of(trajectory: Trajectory, streams: Streams | None) -> list[TrainSample]:
    if not streams:
        return []
    masks = [sequence.trained_mask for sequence in trajectory.sequences]
    turns = _turns_of_tokens(trajectory, masks)
    last_only = any(weights.placed == "last" for weights in streams.values())
    samples = []
    num_left = len(masks)
    for sequence, mask, turn_L in zip(trajectory.sequences, masks, turns, strict=True):
        num_left -= 1
        if last_only:
            mask = _last_of(mask) if not num_left else np.zeros_like(mask)
        if not mask.any():
            continue
        samples.append(
            TrainSample(
                token_ids=sequence.token_ids,
                loss_mask=mask,
                sampler_logprobs=sequence.sampler_logprobs,
                policy_versions=sequence.policy_versions,
                turn_index=np.where(mask, turn_L, np.int32(-1)).astype(np.int32),
                streams={name: _placed(w, turn_L, mask) for name, w in streams.items()},
                draw_id=trajectory.draw_id,
                sample_index=trajectory.sample_index,
                cut=trajectory.cut and not num_left,
            )
        )
    return samples


def _turns_of_tokens(trajectory: Trajectory, masks: Sequence[Bool]) -> list[Int32]:
    """For each sequence the turn of each trained token [L] int32, -1 elsewhere. Trained tokens come
    in the order of the turns; those of a demonstration are one turn."""
    lengths = [len(turn.completion) for turn in trajectory.turns]
    total = sum(int(mask.sum()) for mask in masks)
    of_token = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    if len(of_token) != total:
        of_token = np.zeros(total, np.int32)
    turns, done = [], 0
    for mask in masks:
        turn_L = np.full(len(mask), -1, np.int32)
        count = int(mask.sum())
        turn_L[mask] = of_token[done : done + count]
        done += count
        turns.append(turn_L)
    return turns


def _placed(weights: TurnWeights, turn_L: Int32, mask: Bool) -> Float32:
    """A stream's weights laid on the tokens of one sequence, 0 outside the mask."""
    per_turn = np.asarray(weights.per_turn, np.float32)
    turn = np.zeros_like(turn_L) if len(per_turn) == 1 else turn_L
    if weights.placed == "turn_ends":
        ends = np.flatnonzero(mask)
        following = np.append(turn_L[ends][1:], -1)
        mask = np.zeros_like(mask)
        mask[ends[turn_L[ends] != following]] = True
        turn = turn_L
    return np.where(mask, per_turn[np.maximum(turn, 0)], np.float32(0)).astype(np.float32)


def _last_of(mask: Bool) -> Bool:
    last = np.zeros_like(mask)
    last[np.flatnonzero(mask)[-1:]] = True
    return last


def fingerprint(batch: TrainBatch) -> str:
    """SHA-256 of everything that the optimizer sees of a batch, order included."""
    digest = hashlib.sha256(
        repr((batch.step, batch.draw_ids, sorted(batch.dropped.items()))).encode()
    )
    for sample in batch.samples:
        streams = sorted(sample.streams)
        head = (sample.draw_id, sample.sample_index, len(sample), streams, sample.cut)
        digest.update(repr(head).encode())
        for array in (
            sample.token_ids,
            sample.loss_mask,
            sample.sampler_logprobs,
            sample.policy_versions,
            sample.turn_index,
            *(sample.streams[name] for name in sorted(sample.streams)),
        ):
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()

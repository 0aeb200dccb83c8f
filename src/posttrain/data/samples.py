"""Scored groups -> one training batch. A pure function, so that a redo gives the same bits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from posttrain.algo.credit import Credit, Memory, Streams, TurnWeights
from posttrain.types import (
    Bool,
    Float32,
    Group,
    Int32,
    TrainBatch,
    TrainSample,
    Trajectory,
    trained_kinds,
)


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
    credited = [
        (trajectory, streams)
        for group in groups
        if group.draw.draw_id not in credit.dropped
        for trajectory in group
        if (streams := credit.streams.get((trajectory.draw_id, trajectory.sample_index)))
    ]
    samples = _samples(credited)
    return TrainBatch(
        step=step,
        samples=tuple(samples),
        draw_ids=tuple(group.draw.draw_id for group in groups),
        dropped=dict(credit.dropped),
        metrics=dict(credit.metrics),
    )


def _samples(credited: Sequence[tuple[Trajectory, Streams]]) -> list[TrainSample]:
    """Every sequence with a trained token, in order. The columns of all sequences are computed end
    to end and cut at the end: one sequence alone is too short for array operations to pay."""
    owners = [(t, streams) for t, streams in credited for _ in t.sequences]
    sequences = [sequence for t, _ in credited for sequence in t.sequences]
    if not sequences:
        return []
    ends = np.cumsum([len(sequence) for sequence in sequences])
    bounds = [0, *ends.tolist()]
    kinds = np.concatenate([sequence.kinds for sequence in sequences])
    trained = trained_kinds(kinds)
    turn = np.full(len(kinds), -1, np.int32)
    turn[trained] = _turns_of_tokens([t for t, _ in credited], _counts(trained, bounds))
    mask = _masked_to_last(trained, owners, bounds)
    turn_index = np.where(mask, turn, np.int32(-1))
    counts = _counts(mask, bounds)
    weights = _weights([streams for _, streams in owners], turn, mask, bounds)
    samples = []
    for i, (sequence, (trajectory, streams)) in enumerate(zip(sequences, owners, strict=True)):
        if not counts[i]:
            continue
        at = slice(bounds[i], bounds[i + 1])
        samples.append(
            TrainSample(
                token_ids=sequence.token_ids,
                loss_mask=mask[at],
                sampler_logprobs=sequence.sampler_logprobs,
                policy_versions=sequence.policy_versions,
                turn_index=turn_index[at],
                streams={name: weights[name][i] for name in streams},
                draw_id=trajectory.draw_id,
                sample_index=trajectory.sample_index,
                cut=trajectory.cut and sequence is trajectory.sequences[-1],
            )
        )
    return samples


def _counts(mask: Bool, bounds: Sequence[int]) -> list[int]:
    """How many are True between neighbouring bounds."""
    before = np.append(0, np.cumsum(mask))
    return np.diff(before[list(bounds)]).tolist()


def _turns_of_tokens(trajectories: Sequence[Trajectory], counts: Sequence[int]) -> Int32:
    """The turn of each trained token of all trajectories. `counts` has the trained tokens of every
    sequence. They come in the order of the turns; those of a demonstration are one turn."""
    turns: list[int] = []
    lengths: list[int] = []
    done = 0
    for trajectory in trajectories:
        own = [len(turn.completion) for turn in trajectory.turns]
        total = sum(counts[done : done + len(trajectory.sequences)])
        done += len(trajectory.sequences)
        if sum(own) != total:
            own = [total]
        turns += range(len(own))
        lengths += own
    return np.repeat(np.asarray(turns, np.int32), lengths)


def _masked_to_last(
    trained: Bool, owners: Sequence[tuple[Trajectory, Streams]], bounds: Sequence[int]
) -> Bool:
    """Without all but the last trained token of a trajectory whose stream is placed there."""
    mask = trained
    for i, (trajectory, streams) in enumerate(owners):
        if any(weights.placed == "last" for weights in streams.values()):
            if mask is trained:
                mask = trained.copy()
            mask[bounds[i] : bounds[i + 1]] = False
            if i + 1 == len(owners) or owners[i + 1][0] is not trajectory:
                found = np.flatnonzero(trained[bounds[i] : bounds[i + 1]])
                mask[bounds[i] + found[-1:]] = True
    return mask


def _weights(
    streams: Sequence[Streams], turn: Int32, mask: Bool, bounds: Sequence[int]
) -> dict[str, dict[int, Float32]]:
    """For each stream and each sequence that carries it the weights of its tokens, 0 outside the
    mask."""
    weights: dict[str, dict[int, Float32]] = {}
    for name in dict.fromkeys(name for own in streams for name in own):
        same = np.zeros(len(streams), np.float32)
        placed: dict[int, Float32] = {}
        carriers = [i for i, own in enumerate(streams) if name in own]
        for i in carriers:
            own, at = streams[i][name], slice(bounds[i], bounds[i + 1])
            if len(own.per_turn) == 1 and own.placed != "turn_ends":
                same[i] = own.per_turn[0]
            else:
                placed[i] = _placed(own, turn[at], mask[at])
        flat = np.where(mask, np.repeat(same, np.diff(bounds)), np.float32(0))
        weights[name] = {i: placed.get(i, flat[bounds[i] : bounds[i + 1]]) for i in carriers}
    return weights


def _placed(weights: TurnWeights, turn_L: Int32, mask: Bool) -> Float32:
    """Weights of several turns, or of their ends, laid on the tokens of one sequence."""
    per_turn = np.asarray(weights.per_turn, np.float32)
    if weights.placed == "turn_ends":
        ends = np.flatnonzero(mask)
        following = np.append(turn_L[ends][1:], -1)
        mask = np.zeros_like(mask)
        mask[ends[turn_L[ends] != following]] = True
    return np.where(mask, per_turn[np.maximum(turn_L, 0)], np.float32(0)).astype(np.float32)


def fingerprint(batch: TrainBatch) -> str:
    """SHA-256 of everything that the optimizer sees of a batch, order included."""
    digest = hashlib.sha256(
        repr((batch.step, batch.draw_ids, sorted(batch.dropped.items()))).encode()
    )
    for sample in batch.samples:
        streams = sorted(sample.streams)
        head = (sample.draw_id, sample.sample_index, len(sample), streams, sample.cut)
        arrays = (
            sample.token_ids,
            sample.loss_mask,
            sample.sampler_logprobs,
            sample.policy_versions,
            sample.turn_index,
            *(sample.streams[name] for name in streams),
        )
        pieces = [repr(head).encode(), *(np.ascontiguousarray(a).data for a in arrays)]
        digest.update(b"".join(pieces))
    return digest.hexdigest()

"""Scored groups -> one training batch. A pure function, so that a redo gives the same bits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from posttrain.algo.credit import Credit
from posttrain.types import Group, TrainBatch, TrainSample, Trajectory


class CreditRule(Protocol):
    """What `build_batch` needs of an algorithm."""

    def advantages(self, groups: Sequence[Group]) -> Credit: ...


def build_batch(step: int, groups: Sequence[Group], rule: CreditRule) -> TrainBatch:
    """Every sampled token of every credited trajectory becomes trainable exactly once."""
    credit = rule.advantages(groups)
    samples = [
        sample
        for group in groups
        if group.draw.draw_id not in credit.dropped
        for trajectory in group
        for sample in _samples_of(trajectory, credit)
    ]
    return TrainBatch(
        step=step,
        samples=tuple(samples),
        draw_ids=tuple(group.draw.draw_id for group in groups),
        dropped=dict(credit.dropped),
        metrics=dict(credit.metrics),
    )


def _samples_of(trajectory: Trajectory, credit: Credit) -> list[TrainSample]:
    advantage = credit.advantage.get((trajectory.draw_id, trajectory.sample_index))
    if advantage is None:
        return []
    samples = []
    for sequence in trajectory.sequences:
        mask = sequence.loss_mask
        if not mask.any():
            continue
        samples.append(
            TrainSample(
                token_ids=sequence.token_ids,
                loss_mask=mask,
                sampler_logprobs=sequence.sampler_logprobs,
                policy_versions=sequence.policy_versions,
                advantages=np.where(mask, np.float32(advantage), np.float32(0)),
                draw_id=trajectory.draw_id,
                sample_index=trajectory.sample_index,
            )
        )
    return samples


def fingerprint(batch: TrainBatch) -> str:
    """SHA-256 of everything that the optimizer sees of a batch, order included."""
    digest = hashlib.sha256(
        repr((batch.step, batch.draw_ids, sorted(batch.dropped.items()))).encode()
    )
    for sample in batch.samples:
        digest.update(repr((sample.draw_id, sample.sample_index, len(sample))).encode())
        for array in (
            sample.token_ids,
            sample.loss_mask,
            sample.sampler_logprobs,
            sample.policy_versions,
            sample.advantages,
        ):
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()

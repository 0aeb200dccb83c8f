"""Samples -> micro-batches laid end to end, with no padding between them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from posttrain.types import Microbatch, TrainSample


def pack(samples: Sequence[TrainSample], max_tokens: int) -> list[Microbatch]:
    """Cut samples into micro-batches of at most `max_tokens` tokens each.

    Samples are taken in order of length (ties by their place), so that neighbours share attention
    buckets. A sample longer than `max_tokens` gets a micro-batch of its own. The loss does not
    depend on the cut: its denominators are those of the whole batch.
    """
    order = sorted(range(len(samples)), key=lambda i: (len(samples[i]), i))
    packed: list[Microbatch] = []
    current: list[TrainSample] = []
    used = 0
    for i in order:
        if current and used + len(samples[i]) > max_tokens:
            packed.append(_microbatch(current))
            current, used = [], 0
        current.append(samples[i])
        used += len(samples[i])
    if current:
        packed.append(_microbatch(current))
    return packed


def _microbatch(samples: Sequence[TrainSample]) -> Microbatch:
    return Microbatch(
        token_ids=np.concatenate([s.token_ids for s in samples]).astype(np.int64),
        position_ids=np.concatenate([np.arange(len(s), dtype=np.int64) for s in samples]),
        lengths=tuple(len(s) for s in samples),
        loss_mask=np.concatenate([s.loss_mask for s in samples]),
        sampler_logprobs=np.concatenate([s.sampler_logprobs for s in samples]),
        advantages=np.concatenate([s.advantages for s in samples]),
        sample_index=np.repeat(
            np.arange(len(samples), dtype=np.int32), [len(s) for s in samples]
        ).astype(np.int32),
    )

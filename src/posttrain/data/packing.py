"""Samples -> micro-batches: a prefix tree each, without padding, under a budget of rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posttrain.data.prefix_tree import GrowingTree
from posttrain.types import Microbatch, Stream, TrainSample


def pack(
    samples: Sequence[TrainSample], max_tokens: int, *, whole_groups: bool = False
) -> list[Microbatch]:
    """Cut samples into micro-batches of at most `max_tokens` rows each.

    Samples keep their order, so that siblings stay together and share their prompt. What is longer
    than `max_tokens` gets a micro-batch of its own. With `whole_groups` the samples of a draw are
    never cut apart, as losses over pairs need. The loss does not depend on the cut: its
    denominators are those of the whole batch.
    """
    packed: list[Microbatch] = []
    tree, members = GrowingTree(), list[TrainSample]()
    for unit in _units(samples, whole_groups):
        new_rows = sum(tree.new_rows(sample.token_ids) for sample in unit)
        if members and tree.num_rows + new_rows > max_tokens:
            packed.append(_microbatch(tree, members))
            tree, members = GrowingTree(), []
        for sample in unit:
            tree.add(sample.token_ids)
            members.append(sample)
    if members:
        packed.append(_microbatch(tree, members))
    return packed


def _units(samples: Sequence[TrainSample], whole_groups: bool) -> list[list[TrainSample]]:
    if not whole_groups:
        return [[sample] for sample in samples]
    return [list(unit) for _, unit in groupby(samples, key=lambda s: s.draw_id)]


def label_rows(
    path: NDArray[np.int64], loss_mask: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each trained token of a sample, the row that predicts it and its own row, [N] each.

    The one place that shifts: the logits at a token predict the next one, so the token at position
    j is scored by the row of position j - 1. A sample's first token is never trained.
    """
    trained = np.flatnonzero(loss_mask)
    return path[trained - 1], path[trained]


def _microbatch(growing: GrowingTree, samples: Sequence[TrainSample]) -> Microbatch:
    tree = growing.freeze()
    masks = [s.loss_mask for s in samples]
    rows = [label_rows(path, mask) for path, mask in zip(tree.paths, masks, strict=True)]

    def trained(values: Sequence[NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate([v[m] for v, m in zip(values, masks, strict=True)])

    return Microbatch(
        token_ids=tree.token_ids,
        position_ids=tree.position_ids,
        paths=tree.paths,
        first_owned=tree.first_owned,
        predict_rows=np.concatenate([predict for predict, _ in rows]),
        own_rows=np.concatenate([own for _, own in rows]),
        sampler_logprobs=trained([s.sampler_logprobs for s in samples]),
        policy_versions=trained([s.policy_versions for s in samples]).astype(np.int64),
        turn_index=trained([s.turn_index for s in samples]).astype(np.int64),
        sample_index=np.repeat(np.arange(len(samples)), [int(m.sum()) for m in masks]),
        owners=tuple((s.draw_id, s.sample_index) for s in samples),
        streams=_streams(samples),
        cut=tuple(s.cut for s in samples),
    )


def _streams(samples: Sequence[TrainSample]) -> dict[str, Stream]:
    """For each stream the trained tokens of the samples that carry it."""
    ends = np.cumsum([0, *(s.num_loss_tokens for s in samples)])
    streams = {}
    for name in dict.fromkeys(name for s in samples for name in s.streams):
        carriers = [(i, s) for i, s in enumerate(samples) if name in s.streams]
        streams[name] = Stream(
            np.concatenate([np.arange(ends[i], ends[i + 1]) for i, _ in carriers]),
            np.concatenate([s.streams[name][s.loss_mask] for _, s in carriers]),
        )
    return streams

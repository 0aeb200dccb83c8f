"""Samples -> micro-batches: a prefix tree each, without padding, under a budget of rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from posttrain.data.prefix_tree import GrowingTree
from posttrain.types import Microbatch, TrainSample


def pack(samples: Sequence[TrainSample], max_tokens: int) -> list[Microbatch]:
    """Cut samples into micro-batches of at most `max_tokens` rows each.

    Samples keep their order, so that siblings stay together and share their prompt. A sample
    longer than `max_tokens` gets a micro-batch of its own. The loss does not depend on the cut:
    its denominators are those of the whole batch.
    """
    packed: list[Microbatch] = []
    tree, members = GrowingTree(), list[TrainSample]()
    for sample in samples:
        if members and tree.num_rows + tree.new_rows(sample.token_ids) > max_tokens:
            packed.append(_microbatch(tree, members))
            tree, members = GrowingTree(), []
        tree.add(sample.token_ids)
        members.append(sample)
    if members:
        packed.append(_microbatch(tree, members))
    return packed


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
    own = np.concatenate([label for _, label in rows])
    return Microbatch(
        token_ids=tree.token_ids,
        position_ids=tree.position_ids,
        paths=tree.paths,
        first_owned=tree.first_owned,
        predict_rows=np.concatenate([predict for predict, _ in rows]),
        labels=tree.token_ids[own],
        sampler_logprobs=np.concatenate(
            [s.sampler_logprobs[m] for s, m in zip(samples, masks, strict=True)]
        ),
        advantages=np.concatenate([s.advantages[m] for s, m in zip(samples, masks, strict=True)]),
        sample_index=np.repeat(np.arange(len(samples)), [int(m.sum()) for m in masks]),
    )

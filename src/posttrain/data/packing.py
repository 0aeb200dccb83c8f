"""Samples -> micro-batches: a prefix tree each, without padding, under a budget of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posttrain.data.batch_plan import plan
from posttrain.data.prefix_tree import GrowingTree, PrefixTree, build_prefix_tree
from posttrain.types import Microbatch, Stream, TrainSample


def pack(
    samples: Sequence[TrainSample],
    max_tokens: int,
    *,
    whole_groups: bool = False,
    any_order: bool = False,
) -> list[Microbatch]:
    """Samples in micro-batches of at most `max_tokens` rows each, by the plan of `data.batch_plan`.

    Samples keep their order, so that siblings stay together and share their prompt; the cuts go
    where few rows are computed twice. A sample longer than `max_tokens` gets a micro-batch of its
    own. With `whole_groups` the samples of a draw are never cut apart, as losses over pairs need.
    With `any_order` draws with a common beginning, as those of one environment of a mixture, are
    put side by side: for losses that do not look at a token's place in the step. The loss does not
    depend on the cut: its denominators are those of the whole batch.
    """
    tree = GrowingTree()
    for sample in samples:
        tree.add(sample.token_ids)
    whole = tree.freeze()
    if 0 < whole.num_rows <= max_tokens:
        return [_microbatch(whole, samples, 0)]
    draws = [sample.draw_id for sample in samples]
    packed: list[Microbatch] = []
    parts = plan(whole, draws, max_tokens, whole_groups=whole_groups, any_order=any_order)
    for part in parts:
        members = [samples[i] for i in part.members]
        own = build_prefix_tree([sample.token_ids for sample in members])
        packed.append(_microbatch(own, members, part.num_repeated_rows))
    return packed


def label_rows(
    path: NDArray[np.int64], loss_mask: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each trained token, the row that predicts it and its own row, [N] each. `path` and
    `loss_mask` are those of one sample, or of several end to end.

    The one place that shifts: the logits at a token predict the next one, so the token at position
    j is scored by the row of position j - 1. A sample's first token is never trained.
    """
    trained = np.flatnonzero(loss_mask)
    return path[trained - 1], path[trained]


def _microbatch(
    tree: PrefixTree, samples: Sequence[TrainSample], num_repeated_rows: int
) -> Microbatch:
    mask = np.concatenate([s.loss_mask for s in samples])
    counts = np.add.reduceat(mask, _starts(samples), dtype=np.int64)
    predict_rows, own_rows = label_rows(np.concatenate(tree.paths), mask)

    def trained(values: Sequence[NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate(values)[mask]

    return Microbatch(
        token_ids=tree.token_ids,
        position_ids=tree.position_ids,
        paths=tree.paths,
        first_owned=tree.first_owned,
        predict_rows=predict_rows,
        own_rows=own_rows,
        sampler_logprobs=trained([s.sampler_logprobs for s in samples]),
        policy_versions=trained([s.policy_versions for s in samples]).astype(np.int64),
        turn_index=trained([s.turn_index for s in samples]).astype(np.int64),
        sample_index=np.repeat(np.arange(len(samples)), counts),
        owners=tuple((s.draw_id, s.sample_index) for s in samples),
        streams=_streams(samples, mask, counts),
        cut=tuple(s.cut for s in samples),
        num_repeated_rows=num_repeated_rows,
    )


def _starts(samples: Sequence[TrainSample]) -> NDArray[np.int64]:
    """Where each sample begins among the tokens of all."""
    ends = np.cumsum([len(s) for s in samples])
    return np.append(0, ends[:-1])


def _streams(
    samples: Sequence[TrainSample], mask: NDArray[np.bool_], counts: NDArray[np.int64]
) -> dict[str, Stream]:
    """For each stream the trained tokens of the samples that carry it."""
    ends = np.append(0, np.cumsum(counts))
    starts = np.append(_starts(samples), len(mask))
    streams = {}
    for name in dict.fromkeys(name for s in samples for name in s.streams):
        carriers = [i for i, s in enumerate(samples) if name in s.streams]
        weights = np.concatenate([samples[i].streams[name] for i in carriers])
        if len(carriers) == len(samples):
            streams[name] = Stream(np.arange(ends[-1]), weights[mask])
            continue
        streams[name] = Stream(
            np.concatenate([np.arange(ends[i], ends[i + 1]) for i in carriers]),
            weights[np.concatenate([mask[starts[i] : starts[i + 1]] for i in carriers])],
        )
    return streams

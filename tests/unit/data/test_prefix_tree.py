"""Prefix trees and micro-batches: no token lost, none mixed up, each predicted from before it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.packing import label_rows, pack
from posttrain.data.prefix_tree import build_prefix_tree
from posttrain.types import TrainSample

# Few different tokens, so that prefixes are shared, nested and repeated all the time.
sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=8)


@given(ids=sequences)
@settings(max_examples=150, deadline=None)
def test_a_path_spells_its_sequence_and_equal_prefixes_share_rows(ids: list[list[int]]) -> None:
    tree = build_prefix_tree([np.array(s, np.int32) for s in ids])
    prefixes: dict[tuple[int, ...], int] = {}
    for sequence, path, first in zip(ids, tree.paths, tree.first_owned, strict=True):
        assert tree.token_ids[path].tolist() == sequence
        assert tree.position_ids[path].tolist() == list(range(len(sequence)))
        for depth, row in enumerate(path.tolist()):
            known = prefixes.setdefault(tuple(sequence[: depth + 1]), row)
            assert known == row, "one row per distinct prefix"
        assert np.array_equal(path[first:], np.arange(len(path) - first) + path[first:][:1].sum())
    assert tree.num_rows == len(prefixes), "and no row that no prefix needs"


def sample_of(ids: list[int], trained_from: int, index: int) -> TrainSample:
    length = len(ids)
    mask = np.arange(length) >= trained_from
    numbers = np.arange(length, dtype=np.float32) + 100 * index
    return TrainSample(
        np.array(ids, np.int32),
        mask,
        -numbers,
        np.where(mask, 0, -1).astype(np.int32),
        np.where(mask, np.arange(length), -1).astype(np.int32),
        {"policy": np.where(mask, numbers, 0).astype(np.float32)},
        draw_id=index,
        sample_index=0,
    )


@given(ids=sequences, budget=st.integers(1, 40), cut=st.integers(1, 8))
@settings(max_examples=150, deadline=None)
def test_every_trained_token_is_packed_once_behind_the_row_before_it(
    ids: list[list[int]], budget: int, cut: int
) -> None:
    """a13: log-prob i belongs to token i, whatever shares rows with it."""
    samples = [sample_of(s, min(cut, len(s)), i) for i, s in enumerate(ids)]
    seen = 0
    for micro in pack(samples, budget):
        members = samples[seen : seen + len(micro.paths)]
        seen += len(members)
        assert micro.num_rows <= budget or len(members) == 1
        expected = [
            (
                path[j - 1],
                path[j],
                s.token_ids[j],
                s.sampler_logprobs[j],
                j,
                i,
                -s.sampler_logprobs[j],
            )
            for i, (s, path) in enumerate(zip(members, micro.paths, strict=True))
            for j in np.flatnonzero(s.loss_mask)
        ]
        packed = zip(
            micro.predict_rows,
            micro.own_rows,
            micro.labels,
            micro.sampler_logprobs,
            micro.turn_index,
            micro.sample_index,
            micro.streams["policy"].weights,
            strict=True,
        )
        assert list(packed) == expected
        assert micro.owners == tuple((s.draw_id, s.sample_index) for s in members)
    assert seen == len(samples), "in order, none lost, none twice"


def test_a_sample_longer_than_the_budget_gets_a_microbatch_of_its_own() -> None:
    samples = [
        sample_of([1, 2], 1, 0),
        sample_of([1, 2, 0, 1, 2, 0], 1, 1),
        sample_of([0, 1], 1, 2),
    ]
    assert [len(m.paths) for m in pack(samples, 3)] == [1, 1, 1]


def test_siblings_pay_for_their_prompt_once(make: SimpleNamespace) -> None:
    prompt = np.arange(50, dtype=np.int32)
    siblings = [make.sample(prompt, make.completion([60 + i, 61, 62])) for i in range(8)]
    (micro,) = pack(siblings, 50 + 8 * 3)
    assert (micro.num_rows, micro.num_tokens) == (50 + 8 * 3, 8 * 53)


def test_nothing_packs_into_nothing() -> None:
    assert pack([], 10) == []


def test_the_shift_is_one_token_to_the_left() -> None:
    predict, own = label_rows(np.array([7, 8, 9]), np.array([False, True, True]))
    assert (predict.tolist(), own.tolist()) == ([7, 8], [8, 9])


@pytest.mark.parametrize("token", [0, 2])
def test_the_mask_comes_from_lengths_not_from_ids(token: int, make: SimpleNamespace) -> None:
    """a23: the padding id as a sampled token, and as the end of the turn, trains like any other."""
    (micro,) = pack([make.sample(np.array([5, 6], np.int32), make.completion([7, token]))], 10)
    assert micro.labels.tolist() == [7, token]

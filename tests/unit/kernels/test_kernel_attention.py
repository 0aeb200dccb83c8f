"""Attention kernels against a plain double-precision attention of every sequence by itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from posttrain.kernels.attention import (
    BLOCK,
    Scores,
    TreeIndex,
    padded_head_size,
    pool_attention,
    pool_write,
    tree_attention,
)

SHAPES = [(64, 9, 3), (40, 4, 4), (128, 4, 1), (8, 6, 2), (256, 2, 1)]
"""Head size, query heads, key-value heads."""
KINDS = [(None, None), (24, None), (None, 5.0), (5, 3.0)]
"""Window and soft cap."""

ROOT = np.arange(50)
PATHS = [
    ROOT,
    np.concatenate([ROOT[:37], np.arange(50, 70)]),  # a sibling
    np.array([70]),  # one token
    np.concatenate([ROOT[:3], np.arange(71, 74)]),
    ROOT[:20],  # a prefix of another: it owns nothing
]
FIRST_OWNED = [0, 37, 0, 3, 20]
ROWS = 76  # two rows that no sequence reaches


def random(*shape: int, seed: int) -> torch.Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(torch.bfloat16)


@dataclass
class Case:
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scores: Scores


def case(shape: tuple[int, int, int], kind: tuple[int | None, float | None]) -> Case:
    d, heads, kv_heads = shape
    window, softcap = kind
    return Case(
        random(ROWS, heads, d, seed=1),
        random(ROWS, kv_heads, d, seed=2),
        random(ROWS, kv_heads, d, seed=3),
        Scores(d**-0.5, softcap, window),
    )


def plain(c: Case, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Every sequence with its own mask, in the precision given."""
    out = torch.zeros_like(query)
    repeats = query.shape[1] // key.shape[1]
    for path, first in zip(PATHS, FIRST_OWNED, strict=True):
        index = torch.from_numpy(path)
        keys, values = (t[index].repeat_interleave(repeats, 1) for t in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[index], keys) * c.scores.scaling
        if c.scores.softcap:
            scores = c.scores.softcap * torch.tanh(scores / c.scores.softcap)
        at = torch.arange(len(path))
        seen = at[None] <= at[:, None]
        if c.scores.window:
            seen &= at[None] > at[:, None] - c.scores.window
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        result = torch.einsum("hqk,khd->qhd", weights, values)
        out = out.index_put((index[first:],), result[first:])
    return out


def pooled(c: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values in a pool whose blocks lie in no order, and the block tables."""
    d, kv_heads = c.key.shape[2], c.key.shape[1]
    blocks = np.random.default_rng(0).permutation(40)
    keys = torch.zeros(40, kv_heads, BLOCK * padded_head_size(d), dtype=torch.bfloat16)
    values = torch.zeros_like(keys)
    tables = torch.zeros(len(PATHS), 4, dtype=torch.int32)
    used = 0
    for n, path in enumerate(PATHS):
        count = -(-len(path) // BLOCK)
        tables[n, :count] = torch.from_numpy(blocks[used : used + count].astype(np.int32))
        used += count
        at = torch.arange(len(path))
        slots = (tables[n, at // BLOCK] * BLOCK + at % BLOCK).to(torch.int32)
        index = torch.from_numpy(path)
        pool_write(c.key[index], c.value[index], slots, keys, values)
    return keys, values, tables


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_are_those_of_each_sequence_by_itself(
    shape: tuple[int, int, int], kind: tuple[int | None, float | None]
) -> None:
    c = case(shape, kind)
    found = tree_attention(c.query, c.key, c.value, TreeIndex(PATHS, FIRST_OWNED), c.scores)
    expected = plain(c, c.query.double(), c.key.double(), c.value.double())
    assert float((found.double() - expected).abs().max()) < 0.02
    assert bool((found[-2:] == 0).all()), "rows that no sequence owns"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_those_of_each_sequence_by_itself(
    shape: tuple[int, int, int], kind: tuple[int | None, float | None]
) -> None:
    c = case(shape, kind)
    slope = random(*c.query.shape, seed=4)
    leaves = [t.detach().requires_grad_() for t in (c.query, c.key, c.value)]
    out = tree_attention(*leaves, TreeIndex(PATHS, FIRST_OWNED), c.scores)
    found = torch.autograd.grad(out, leaves, slope)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    expected = torch.autograd.grad(plain(c, *exact), exact, slope.double())
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours.double() - theirs).norm() / theirs.norm()) < 8e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_pool_gives_the_bits_of_the_tree_for_many_queries_and_for_one(
    shape: tuple[int, int, int], kind: tuple[int | None, float | None]
) -> None:
    """Prefill, decoding and training are one function of a query and its keys."""
    c = case(shape, kind)
    expected = tree_attention(c.query, c.key, c.value, TreeIndex(PATHS, FIRST_OWNED), c.scores)
    keys, values, tables = pooled(c)
    owned = [(n, p) for n, f in enumerate(FIRST_OWNED) for p in range(f, len(PATHS[n]))]
    rows = torch.tensor([int(PATHS[n][p]) for n, p in owned], dtype=torch.int32)
    positions = torch.tensor([p for _, p in owned], dtype=torch.int32)
    counts = [sum(n == m for m, _ in owned) for n in range(len(PATHS))]
    starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
    many = pool_attention(c.query, keys, values, tables, rows, positions, starts, c.scores)
    assert torch.equal(many, expected)
    for n, p in owned[::7]:
        row = int(PATHS[n][p])
        one = pool_attention(
            c.query[row : row + 1], keys, values, tables[n : n + 1],
            torch.zeros(1, dtype=torch.int32), torch.tensor([p], dtype=torch.int32),
            torch.tensor([0, 1], dtype=torch.int32), c.scores,
        )  # fmt: skip
        assert torch.equal(one[0], expected[row])


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    c = case((64, 9, 3), (None, None))
    slope = random(*c.query.shape, seed=4)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            leaves = [t.detach().requires_grad_() for t in (c.query, c.key, c.value)]
            out = tree_attention(*leaves, TreeIndex(PATHS, FIRST_OWNED), c.scores)
            results.append((out, *torch.autograd.grad(out, leaves, slope)))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_a_shared_prefix_gets_the_gradients_of_all_that_read_it() -> None:
    c = case((64, 9, 3), (None, None))
    leaves = [t.detach().requires_grad_() for t in (c.query, c.key, c.value)]
    out = tree_attention(*leaves, TreeIndex(PATHS, FIRST_OWNED), c.scores)
    slope = torch.zeros_like(out)
    slope[50:70] = 1  # of the sibling alone
    _, dkey, dvalue = torch.autograd.grad(out, leaves, slope)
    assert bool((dvalue[:37].abs().sum((1, 2)) > 0).all())
    assert bool((dvalue[37:50] == 0).all()) and bool((dkey[70:] == 0).all())


def test_no_sequences_give_zeros() -> None:
    c = case((64, 9, 3), (None, None))
    assert bool((tree_attention(c.query, c.key, c.value, TreeIndex([], []), c.scores) == 0).all())


def test_values_of_another_head_size_are_refused_before_c_reads_them() -> None:
    c = case((64, 9, 3), (None, None))
    index = TreeIndex(PATHS, FIRST_OWNED)
    with pytest.raises(ValueError, match="kernel argument"):
        tree_attention(c.query, c.key, c.value[:, :, :32], index, c.scores)
    with pytest.raises(ValueError, match="paths of 74 rows"):
        tree_attention(c.query[:70], c.key[:70], c.value[:70], index, c.scores)


def test_gradients_do_not_depend_on_how_many_sequences_fit_into_a_wave() -> None:
    """64 siblings of a prompt of 2,000 tokens: several waves, each sibling alone for comparison."""
    prompt, own, d = 2000, 4, 16
    paths = [np.arange(prompt)]
    paths += [
        np.concatenate([np.arange(prompt), prompt + own * n + np.arange(own)]) for n in range(300)
    ]
    rows = prompt + own * 300
    leaves = [random(rows, 1, d, seed=s).requires_grad_() for s in (1, 2, 3)]
    scores = Scores(0.25, None, None)
    out = tree_attention(*leaves, TreeIndex(paths, [0] + [prompt] * 300), scores)
    slope = random(*out.shape, seed=4)
    found = torch.autograd.grad(out, leaves, slope)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    query, key, value = exact
    whole = torch.einsum("qhd,khd->hqk", query, key) * scores.scaling
    at = torch.arange(rows)
    sibling = (at - prompt).div(own, rounding_mode="floor").clamp_min(-1)
    seen = (at[None] <= at[:, None]) & ((sibling[None] == -1) | (sibling[None] == sibling[:, None]))
    weights = whole.masked_fill(~seen, float("-inf")).softmax(-1)
    expected = torch.autograd.grad(
        torch.einsum("hqk,khd->qhd", weights, value), exact, slope.double()
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours.double() - theirs).norm() / theirs.norm()) < 8e-3

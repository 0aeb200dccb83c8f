"""Paged attention gives what attention over whole sequences gives, and reads nothing else."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from posttrain.memory import resident_bytes
from posttrain.training.attention import Core, TreeLayout
from posttrain.training.paged import BLOCK, KVPool, PagedLayout

K, R, D = 2, 2, 8
LENGTHS = (70, 1, 33, 16)
DTYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Rows:
    """The tokens of all sequences end to end, and where they go in a pool."""

    def __init__(self, dtype: torch.dtype) -> None:
        total = sum(LENGTHS)
        self.query = random(total, K, R, D, seed=1, dtype=dtype)
        self.key, self.value = (random(total, K, D, seed=s, dtype=dtype) for s in (2, 3))
        self.sequences = np.repeat(np.arange(len(LENGTHS), dtype=np.int32), LENGTHS)
        self.positions = np.concatenate([np.arange(n, dtype=np.int32) for n in LENGTHS])
        blocks = iter(np.random.default_rng(0).permutation(40).astype(np.int32))
        self.tables = np.zeros((len(LENGTHS), 5), np.int32)
        for table, length in zip(self.tables, LENGTHS, strict=True):
            for b in range(-(-length // BLOCK)):
                table[b] = next(blocks)
        self.slots = self.tables[self.sequences, self.positions // BLOCK] * BLOCK
        self.slots += self.positions % BLOCK

    def expected(self, core: Core) -> torch.Tensor:
        bounds = np.cumsum([0, *LENGTHS])
        paths = [np.arange(a, b) for a, b in pairwise(bounds)]
        layout = TreeLayout(paths, [0] * len(paths), len(self.query))
        return layout.attend(0, self.query, self.key, self.value, core)

    def paged(self, pool: KVPool, core: Core, rows: np.ndarray) -> torch.Tensor:
        layout = PagedLayout(
            pool, self.tables, self.sequences[rows], self.positions[rows], self.slots[rows]
        )
        return layout.attend(0, self.query[rows], self.key[rows], self.value[rows], core)


@pytest.fixture(params=DTYPES, ids=str)
def rows(request: pytest.FixtureRequest) -> Rows:
    return Rows(request.param)


@pytest.fixture(params=[(None, None), (20, None), (None, 2.0)], ids=str)
def core(request: pytest.FixtureRequest) -> Core:
    window, softcap = request.param
    return Core(0.3, window, softcap, False)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.dtype == torch.bfloat16:
        return torch.equal(found, expected)
    return torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("size", [1000, 50, 7, 1])
def test_any_cut_into_passes_gives_the_same(size: int, rows: Rows, core: Core) -> None:
    """Prefill at once and in pieces, and decoding: bit for bit in bf16."""
    pool = KVPool(1, 40)
    total = sum(LENGTHS)
    found = [
        rows.paged(pool, core, np.arange(start, min(start + size, total)))
        for start in range(0, total, size)
    ]
    assert same(torch.cat(found), rows.expected(core))


def test_sequences_decode_together_in_any_order(rows: Rows, core: Core) -> None:
    pool = KVPool(1, 40)
    rows.paged(pool, core, np.arange(sum(LENGTHS)))
    last = np.cumsum(LENGTHS) - 1
    for order in (last, last[::-1].copy(), last[[2, 0]]):
        keep = np.sort(rows.sequences[order])
        layout = PagedLayout(
            pool,
            rows.tables[rows.sequences[order]],
            np.arange(len(order), dtype=np.int32),
            rows.positions[order],
            rows.slots[order],
        )
        found = layout.attend(0, rows.query[order], rows.key[order], rows.value[order], core)
        assert same(found, rows.expected(core)[order]), keep


def test_what_other_sequences_left_in_a_block_does_not_matter(rows: Rows, core: Core) -> None:
    pool = KVPool(1, 40)
    everything = np.arange(40 * BLOCK, dtype=np.int32)
    junk = random(len(everything), K, D, seed=9, dtype=rows.key.dtype) * 1e4
    native = core.native(rows.query, rows.key, rows.value)
    pool.write(0, torch.from_numpy(everything), junk, junk, native)
    found = rows.paged(pool, core, np.arange(sum(LENGTHS)))
    assert same(found, rows.expected(core))


def test_a_row_may_be_written_for_several_sequences_and_padding_rows_get_zeros(
    rows: Rows, core: Core
) -> None:
    """Two siblings of one prompt of 20 tokens: a shared block, and an end written for each."""
    tables = np.array([[3, 5], [3, 8]], np.int32)
    positions = np.arange(20, dtype=np.int32)
    slots = tables[0, positions // BLOCK] * BLOCK + positions % BLOCK
    again = np.arange(16, 20)
    layout = PagedLayout(
        KVPool(1, 10),
        tables,
        np.zeros(20, np.int32),
        positions,
        np.concatenate([slots, 8 * BLOCK + again - 16]).astype(np.int32),
        write_rows=np.concatenate([np.arange(20), again]),
    )
    padded = [torch.cat([t[:20], t[:4]]) for t in (rows.query, rows.key, rows.value)]
    out = layout.attend(0, *padded, core)
    assert torch.count_nonzero(out[20:]) == 0
    pool = layout._pool
    one = np.zeros(1, np.int32)
    found = []
    for n in (0, 1):  # the last token once more, read from each table
        single = PagedLayout(pool, tables[n : n + 1], one, positions[-1:], slots[-1:])
        query, key, value = (t[19:20] for t in (rows.query, rows.key, rows.value))
        found.append(single.attend(0, query, key, value, core))
    assert same(found[0], out[19:20]) and same(found[1], out[19:20])


def test_room_that_is_not_used_takes_no_memory() -> None:
    """Pages are given when they are written."""
    pool = KVPool(1, 1 << 22)
    before = resident_bytes()
    pool.write(0, torch.tensor([5], dtype=torch.int32), *(torch.ones(1, 1, 8),) * 2)
    assert pool.bytes == 2 * (1 << 22) * BLOCK * 8 * 4
    assert resident_bytes() - before < 1 << 27
    pool.clear()
    assert pool.bytes == 0

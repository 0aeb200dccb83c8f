"""The attention arithmetic against the formula, and the cache against forgetting."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.training.attention import Core, TreeLayout, bucket_of

GENERATOR = torch.Generator().manual_seed(0)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR).to(dtype)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (None, 1.5), (3, 1.5)])
def test_attention_is_the_formula(window: int | None, softcap: float | None, fused: bool) -> None:
    """Causal, scaled, capped, within the window, grouped heads: in float64, one query at a time."""
    n, k, r, q, s, d = 2, 2, 3, 4, 64, 8
    query, key, value = random(n, k, r, q, d), random(n, k, s, d), random(n, k, s, d)
    positions = torch.tensor([[0, 1, 5, 63], [7, 2, 0, 40]])
    out = Core(0.3, window, softcap, fused)(query, key, value, positions)
    for i in range(n):
        for j in range(q):
            last = int(positions[i, j])
            first = 0 if window is None else max(0, last - window + 1)
            seen = slice(first, last + 1)
            scores = 0.3 * torch.einsum(
                "krd,ksd->krs", query[i, :, :, j].double(), key[i, :, seen].double()
            )
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            expected = torch.einsum("krs,ksd->krd", scores.softmax(-1), value[i, :, seen].double())
            torch.testing.assert_close(out[i, :, :, j].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("k", "r", "d"), [(1, 1, 8), (4, 1, 8), (2, 2, 8), (2, 2, 16), (3, 3, 64)])
def test_a_lone_sequence_rounds_in_bf16_as_it_does_among_others(k: int, r: int, d: int) -> None:
    """ATen chooses its bf16 kernel by the work of the whole batch; tiny models cross that line."""
    core = Core(1 / math.sqrt(d), None, None, False)
    for _ in range(10):
        query = random(16, k, r, 1, d, dtype=torch.bfloat16) * 3
        key, value = (random(16, k, 64, d, dtype=torch.bfloat16) for _ in range(2))
        positions = torch.arange(48, 64)[:, None]
        together = core(query, key, value, positions)
        for i in range(16):
            one = slice(i, i + 1)
            alone = core(query[one], key[one], value[one], positions[one])
            assert torch.equal(alone, together[one])


@pytest.mark.parametrize(("length", "bucket"), [(1, 64), (63, 64), (64, 64), (65, 128), (128, 128)])
def test_keys_are_padded_to_whole_blocks(length: int, bucket: int) -> None:
    assert bucket_of(length) == bucket


def test_rows_that_no_path_reaches_get_zeros_even_beside_nan() -> None:
    """Padding rows may hold anything; they neither give nor take."""
    import numpy as np

    query, key, value = random(6, 2, 2, 8), random(6, 2, 8), random(6, 2, 8)
    core = Core(0.3, None, None, False)
    layout = TreeLayout([np.arange(3)], [0], 6)
    clean = layout.attend(0, query, key, value, core)
    for tensor in (query, key, value):
        tensor[3:] = float("nan")
    dirty = layout.attend(0, query, key, value, core)
    assert torch.equal(clean[:3], dirty[:3])
    assert torch.count_nonzero(dirty[3:]) == 0

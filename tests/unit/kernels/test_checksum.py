"""The hash of weights: the same with and without kernels, another for any change."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from posttrain.kernels import checksum as module
from posttrain.kernels.checksum import CHUNK, checksum

SIZES = [0, 1, 2, 3, 1000, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 7]


def numbers(size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize("size", SIZES)
def test_the_kernel_computes_what_numpy_computes(size: int) -> None:
    words = numbers(size).view(torch.int32)
    assert np.array_equal(module._by_kernel(words), module._by_numpy(words.numpy()))


def test_it_is_the_sum_of_products_of_the_rfc() -> None:
    words = numbers(CHUNK).view(torch.int32).numpy().view(np.uint32)
    key = module._key()
    for column, shift in enumerate((0, 4)):
        total = 0
        for i in range(0, CHUNK, 2):
            a = (int(words[i]) + int(key[i + shift])) % 2**32
            b = (int(words[i + 1]) + int(key[i + 1 + shift])) % 2**32
            total = (total + a * b) % 2**64
        assert total == int(module._by_numpy(words.view(np.int32))[0, column])


def test_any_flipped_bit_changes_it() -> None:
    base = numbers(CHUNK + 50)
    expected = checksum(base)
    for place in (0, 1, 17, CHUNK - 1, CHUNK, CHUNK + 49):
        for bit in (0, 15, 31):
            changed = base.clone()
            changed.view(torch.int32)[place] ^= -(1 << 31) if bit == 31 else 1 << bit
            assert checksum(changed) != expected, (place, bit)


def test_order_length_and_chunks_count() -> None:
    base = numbers(2 * CHUNK)
    swapped = torch.cat([base[CHUNK:], base[:CHUNK]])
    pairs = base.view(-1, 2).flip(1).reshape(-1)
    longer = torch.cat([base, torch.zeros(1)])
    shorter = base[:-1]
    found = {checksum(t) for t in (base, swapped, pairs, longer, shorter)}
    assert len(found) == 5
    assert checksum(torch.zeros(3)) != checksum(torch.zeros(4))
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))


def test_threads_do_not_change_it() -> None:
    base, threads = numbers(5 * CHUNK), torch.get_num_threads()
    try:
        found = set()
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.add(checksum(base))
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1

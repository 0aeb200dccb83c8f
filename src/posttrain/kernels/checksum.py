"""A hash of many float32 numbers at the speed of memory.

Chunks of 64 KiB are compressed to 128 bits with NH, the universal hash of UMAC (RFC 4418), under a
fixed key, and what is left goes through SHA-256. Two arrays that differ in any bit have chunks that
collide with a chance of at most 2^-64 over the choice of key; it is no defence against somebody who
knows the key. With and without the compiled kernels the result is the same.
"""

from __future__ import annotations

import hashlib
from functools import cache

import numpy as np
import torch

from posttrain.kernels.library import functions, library, pointer
from posttrain.randomness import stream

CHUNK = 16_384
"""Words of a chunk."""
_SHIFT = 4


@cache
def _key() -> np.ndarray:
    rng = stream(0, "checksum key")
    return rng.integers(0, 1 << 32, CHUNK + _SHIFT, dtype=np.uint64).astype(np.uint32)


def checksum(numbers: torch.Tensor) -> bytes:
    """Of the bits of a contiguous float32 CPU tensor and how many there are; 32 bytes."""
    words = numbers.detach().contiguous().view(-1).view(torch.int32)
    compressed = _by_kernel(words) if library().functions is not None else _by_numpy(words.numpy())
    return hashlib.sha256(len(words).to_bytes(8, "little") + compressed.tobytes()).digest()


def _by_kernel(words: torch.Tensor) -> np.ndarray:
    out = torch.empty(-(-len(words) // CHUNK), 2, dtype=torch.int64)
    key = torch.from_numpy(_key().view(np.int32))
    functions().nh_chunks(
        pointer(words, dtype=torch.int32), len(words), pointer(key, dtype=torch.int32), CHUNK,
        pointer(out, dtype=torch.int64), torch.get_num_threads(),
    )  # fmt: skip
    return out.numpy().view(np.uint64)


def _by_numpy(words: np.ndarray) -> np.ndarray:
    key = _key()
    data = words.view(np.uint32)
    out = np.empty((-(-len(data) // CHUNK), 2), np.uint64)
    for row, start in zip(out, range(0, len(data), CHUNK), strict=True):
        chunk = np.zeros(CHUNK, np.uint32)
        piece = data[start : start + CHUNK]
        chunk[: len(piece)] = piece
        for i, shift in enumerate((0, _SHIFT)):
            sums = (chunk + key[shift : shift + CHUNK]).astype(np.uint64).reshape(-1, 2)
            row[i] = (sums[:, 0] * sums[:, 1]).sum(dtype=np.uint64)
    return out

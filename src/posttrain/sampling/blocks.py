"""Which blocks of the pool are free, in use, or kept because a later prompt may begin alike.

A full block is known by the policy version and all tokens up to its end. When nothing uses it any
more it stays, until its place is needed: the least recently used goes first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from posttrain.training.paged import BLOCK
from posttrain.types import Int32


class BlockStore:
    """Counts who uses each of `num_blocks` blocks, and finds blocks by what they hold."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # low numbers first
        self._uses = [0] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Blocks that can be had: free ones, and kept ones that nothing uses."""
        return len(self._free) + len(self._unused)

    @property
    def num_in_use(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_kept(self) -> int:
        return len(self._unused)

    def allocate(self) -> int | None:
        """A block for one user, whose old content is forgotten; None when all are in use."""
        if self._free:
            block = self._free.pop()
        elif self._unused:
            block, _ = self._unused.popitem(last=False)
            self._forget(block)
        else:
            return None
        self._uses[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """One more user of each."""
        for block in blocks:
            self._uses[block] += 1
            self._unused.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """One user less; the ends of sequences are given up before their beginnings."""
        for block in reversed(blocks):
            self._uses[block] -= 1
            assert self._uses[block] >= 0, f"block {block} was released more often than used"
            if self._uses[block] == 0:
                if block in self._key_of:
                    self._unused[block] = None
                else:
                    self._free.append(block)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Blocks of the longest run of keys that are there, from the first on."""
        found = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def keep(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """Make full blocks known by their keys. What is known already stays with its block."""
        for block, key in zip(blocks, keys, strict=True):
            if key not in self._by_key and block not in self._key_of:
                self._by_key[key] = block
                self._key_of[block] = key

    def forget_all(self) -> None:
        """Nothing is found any more; blocks in use go on being used."""
        self._by_key.clear()
        self._key_of.clear()
        self._free.extend(reversed(self._unused))
        self._unused.clear()

    def _forget(self, block: int) -> None:
        del self._by_key[self._key_of.pop(block)]


def block_keys(version: int, token_ids: Int32, known: Sequence[bytes] = ()) -> list[bytes]:
    """A key for each full block of the tokens [L] int32, of which `known` are the first ones.

    A key is a hash of the version and of all tokens up to the block's end: 128 bits, so that two
    beginnings that differ do not meet.
    """
    keys = list(known)
    data = np.ascontiguousarray(token_ids, np.int32)
    for start in range(len(keys) * BLOCK, len(data) - BLOCK + 1, BLOCK):
        before = keys[-1] if keys else version.to_bytes(8, "little", signed=True)
        content = data[start : start + BLOCK].tobytes()
        keys.append(hashlib.blake2b(before + content, digest_size=16).digest())
    return keys

"""A seeded order of any number of things, without holding it in memory."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

# Over all 120 orders of 5 things 8 rounds are far from uniform (chi2 740), 16 are not (113).
_ROUNDS = 16


@dataclass(frozen=True, slots=True)
class Permutation:
    """A bijection of 0..size-1 that is a pure function of (size, seed).

    A Feistel network over the next power of two, walked until it lands inside the range (Black
    and Rogaway 2002, "Ciphers with arbitrary finite domains"). Time and memory per index don't
    depend on `size`.

    Example:
        >>> sorted(Permutation(5, seed=1)[i] for i in range(5))
        [0, 1, 2, 3, 4]
    """

    size: int
    seed: int

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"Permutation.size is {self.size}; need 0 or more")

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        """Where `index` goes. Raises IndexError outside 0..size-1."""
        if not 0 <= index < self.size:
            raise IndexError(f"index {index} is outside a permutation of {self.size}")
        bits = (self.size - 1).bit_length()
        value = self._mix(index, bits)
        while value >= self.size:  # ends: the walk is a cycle that holds `index`, which is inside
            value = self._mix(value, bits)
        return value

    def _mix(self, value: int, bits: int) -> int:
        low_bits = bits - bits // 2
        low_mask, high_mask = (1 << low_bits) - 1, (1 << (bits // 2)) - 1
        high, low = value >> low_bits, value & low_mask
        for number in range(_ROUNDS):
            if number % 2:
                high ^= self._noise(number, low) & high_mask
            else:
                low ^= self._noise(number, high) & low_mask
        return (high << low_bits) | low

    def _noise(self, number: int, half: int) -> int:
        text = b"%d %d %d" % (self.seed, number, half)
        return int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little")

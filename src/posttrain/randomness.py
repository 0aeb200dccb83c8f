"""Counter-based random streams: a draw depends on its key alone, never on scheduling.

Every stream is keyed by (run seed, purpose, numbers...), for instance
`stream(seed, "sample", draw_id, sample_index, turn)`. There is no global state to restore, so
a resumed run draws what the uninterrupted one would have drawn.
"""

from __future__ import annotations

import hashlib

import numpy as np


def derive_seed(run_seed: int, purpose: str, *numbers: int) -> int:
    """A 63-bit seed that is a pure function of its arguments.

    Example:
        >>> derive_seed(0, "sample", 3, 1) == derive_seed(0, "sample", 3, 1)
        True
        >>> derive_seed(0, "sample", 3, 1) == derive_seed(0, "sample", 31)
        False
    """
    key = repr((int(run_seed), purpose, tuple(map(int, numbers)))).encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "little") >> 1


def generator(seed: int) -> np.random.Generator:
    """A Philox generator (counter-based, Salmon et al. 2011) for a seed from `derive_seed`."""
    return np.random.Generator(np.random.Philox(key=seed))


def stream(run_seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """`generator(derive_seed(...))`."""
    return generator(derive_seed(run_seed, purpose, *numbers))

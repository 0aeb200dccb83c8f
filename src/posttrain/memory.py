"""How much memory this process may use, and how much it does."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator
from pathlib import Path


def memory_limit() -> int:
    """Bytes: the machine's memory, or what its control group allows if that is less."""
    return min([_physical(), *_group_limits()])


def _physical() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _group_limits() -> Iterator[int]:
    for path in ("memory.max", "memory/memory.limit_in_bytes"):  # v2, v1
        try:
            text = (Path("/sys/fs/cgroup") / path).read_text(encoding="utf-8").strip()
        except OSError:
            continue
        if text.isdigit():  # v2 writes "max" for none
            yield int(text)


def peak_bytes() -> int:
    """The most that was resident since the process began."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident_bytes() -> int:
    """What is resident now; the peak where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return peak_bytes()
    return pages * os.sysconf("SC_PAGE_SIZE")


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Let the C library hand freed memory out again, whatever its size, in place of giving it back
    to the system and asking for pages anew: a training step frees and takes a gigabyte. False where
    the library is not glibc or refuses.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, 1 << 30) and mallopt(_M_TRIM_THRESHOLD, _LARGEST))

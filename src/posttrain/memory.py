"""How much memory this process may use, and how much it does."""

from __future__ import annotations

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

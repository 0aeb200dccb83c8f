"""Compiles and loads the C sources in `native/`, once for each kind of processor."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from posttrain.config import cache_dir

SOURCES = Path(__file__).parent / "native"
FLAGS = (
    *("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-std=gnu11"),
    "-fno-strict-aliasing",  # bf16 numbers are read back in pairs, as 32-bit words
)
MAX_HEAD_SIZE = 256
"""MAX_D of attention.c."""
LEAVE_OUT = "POSTTRAIN_KERNELS"
"""Environment variable: 0 leaves the functions out."""
_COMPILERS = ("cc", "gcc", "clang")
_BUILD_S = 120


@dataclass(frozen=True, slots=True)
class Library:
    """`functions` is None where `problem` says why there are none."""

    functions: ctypes.CDLL | None
    problem: str | None = None


@cache
def library() -> Library:
    """The compiled functions, or why there are none here. $POSTTRAIN_KERNELS=0 leaves them out."""
    if os.environ.get(LEAVE_OUT) == "0":
        return Library(None, f"{LEAVE_OUT} is 0; unset it")
    compiler = _compiler()
    if compiler is None:
        return Library(None, "no C compiler: install one (Debian, Ubuntu: gcc) or set CC")
    try:
        target = cache_dir() / "kernels" / f"{_fingerprint(compiler)}.so"
        return Library(_typed(_loaded(compiler, target)))
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "").strip().splitlines()
        return Library(None, f"{compiler[0]} failed: {lines[0] if lines else error}")
    except (OSError, subprocess.TimeoutExpired) as error:
        return Library(None, f"{type(error).__name__}: {error}")


def available(*tensors: torch.Tensor) -> bool:
    """Whether these can be given to the functions: bf16 on a CPU, and there are functions."""
    return all(t.dtype == torch.bfloat16 and t.device.type == "cpu" for t in tensors) and (
        library().functions is not None
    )


def kind() -> str:
    """What computes bf16 rows here: `compiled` or `torch`. They round differently, so a run goes on
    and is replayed with the one it began with."""
    return "torch" if library().functions is None else "compiled"


def functions() -> ctypes.CDLL:
    """For callers that asked `available` before."""
    found = library().functions
    assert found is not None
    return found


def pointer(
    tensor: torch.Tensor | None,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> ctypes.c_void_p:
    """Where a contiguous tensor's numbers are; a null pointer for None. It keeps the tensor alive,
    which may be a copy that nobody else knows.

    Raises ValueError for another dtype, device or (where one is given) shape: C would read on.
    """
    if tensor is None:
        return ctypes.c_void_p(None)
    if tensor.dtype != dtype or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"kernel argument: {_described(tensor)} is no contiguous CPU {dtype}")
    if shape is not None and tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"kernel argument: {_described(tensor)} is not of shape {tuple(shape)}")
    address = ctypes.c_void_p(tensor.data_ptr())
    address.owner = tensor  # type: ignore[attr-defined]
    return address


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"


def checked(failed: int) -> None:
    """Raises MemoryError when a kernel says that memory ran out."""
    if failed:
        raise MemoryError("a kernel found no memory for its scratch buffers")


def _loaded(compiler: Sequence[str], target: Path) -> ctypes.CDLL:
    """The cached build, or a new one where there is none that can be loaded."""
    if target.exists():
        with suppress(OSError):
            return ctypes.CDLL(str(target))
    _build(compiler, target)
    return ctypes.CDLL(str(target))


def _compiler() -> list[str] | None:
    """The command and its own options, as $CC may give them."""
    named = shlex.split(os.environ.get("CC", ""))
    candidates = [named] if named else [[name] for name in _COMPILERS]
    return next((command for command in candidates if shutil.which(command[0])), None)


def _fingerprint(compiler: Sequence[str]) -> str:
    """Of all that decides what is built: sources, flags, compiler, processor."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=_BUILD_S)
    digest = hashlib.sha256(repr((FLAGS, compiler, platform.machine(), version.stdout)).encode())
    digest.update(_processor())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:24]


def _processor() -> bytes:
    """The instructions it knows: what `-march=native` asks for."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_bytes().splitlines() if facts.exists() else []
    known = [line for line in lines if line.startswith((b"flags", b"Features", b"model name"))]
    return b"\n".join(known[:2]) or platform.processor().encode()


def _build(compiler: Sequence[str], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = Path(scratch) / target.name
        sources = sorted(str(source) for source in SOURCES.glob("*.c"))
        subprocess.run(
            [*compiler, *FLAGS, "-o", str(built), *sources, "-lm"],
            check=True,
            capture_output=True,
            text=True,
            timeout=_BUILD_S,
        )
        built.replace(target)  # another process may build the same: either file is whole


_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_SHAPE = [_F, _F, _I, _I, _I, _I, _I]  # scaling, softcap, window, heads, kv_heads, d, threads
_SIGNATURES: dict[str, list[type]] = {
    "rms_norm": [_P, _P, _F, _P, _P, _L, _I, _I],
    "rms_norm_backward": [_P, _P, _P, _P, _P, _P, _L, _I, _I],
    "swiglu": [_P, _P, _P, _L, _I, _I],
    "swiglu_backward": [_P, _P, _P, _P, _P, _L, _I, _I],
    "rotate": [_P, _P, _P, _P, _L, _I, _I, _F, _I],
    "logit_stats": [_P, _P, _F, _P, _P, _P, _L, _I, _I],
    "logit_stats_backward": [_P, _P, _F, _P, _P, _P, _P, _L, _I, _I],
    "sample": [_P, _P, _P, _P, _P, _L, _I, _I],
    "nh_chunks": [_P, _L, _P, _I, _P, _I],
    "pool_write": [_P, _P, _P, _P, _P, _L, _I, _I, _I, _I],
    "pool_attention": [_P, _P, _P, _P, _I, _P, _P, _P, _L, _P, *_SHAPE],
    "tree_attention": [_P, _P, _P, _P, _P, _P, _P, _L, _I, _P, _P, *_SHAPE],
    "tree_attention_backward": [
        *[_P] * 10,
        _L,
        _I,
        _L,
        _P,
        _P,
        _P,
        *_SHAPE,
    ],
}


_MAY_FAIL = {"sample", "pool_attention", "tree_attention", "tree_attention_backward"}


def _typed(loaded: ctypes.CDLL) -> ctypes.CDLL:
    for name, arguments in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes = arguments
        function.restype = _I if name in _MAY_FAIL else None
    return loaded

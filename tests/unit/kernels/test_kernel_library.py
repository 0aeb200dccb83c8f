"""A machine on which the kernels cannot be built says why, and torch does the work."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from posttrain.kernels import library as module
from posttrain.kernels.library import Library, available, library, pointer


@pytest.fixture
def rebuilt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> object:
    """`library()` looks again, in an empty cache."""
    monkeypatch.setenv("POSTTRAIN_CACHE", str(tmp_path))

    def again() -> Library:
        return library.__wrapped__()

    return again


def test_without_a_compiler_the_problem_names_the_remedy(
    rebuilt: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    found = rebuilt()  # type: ignore[operator]
    assert found.functions is None and "install" in found.problem


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing_behind(
    rebuilt: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "cc"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] || { echo "no such flag" >&2; exit 1; }\n')
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    found = rebuilt()  # type: ignore[operator]
    assert found.functions is None and "no such flag" in found.problem
    assert not list((tmp_path / "kernels").iterdir())


def test_a_damaged_cached_build_is_built_again(rebuilt: object, tmp_path: Path) -> None:
    compiler = module._compiler()
    assert compiler is not None
    built = tmp_path / "kernels" / f"{module._fingerprint(compiler)}.so"
    built.parent.mkdir()
    built.write_bytes(b"not a library")
    found = rebuilt()  # type: ignore[operator]
    assert found.functions is not None and built.stat().st_size > 10_000


def test_they_can_be_left_out(rebuilt: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTTRAIN_KERNELS", "0")
    assert rebuilt().functions is None  # type: ignore[operator]


def test_only_bf16_on_a_cpu_is_given_to_them() -> None:
    assert available(torch.zeros(2, dtype=torch.bfloat16))
    assert not available(torch.zeros(2))
    assert not available(torch.zeros(2, dtype=torch.bfloat16, device="meta"))


def test_a_pointer_keeps_its_numbers_alive() -> None:
    """Callers write `pointer(x.contiguous())`: without an owner the copy would be freed at once."""
    source = torch.arange(6.0).view(2, 3).T
    address = pointer(source.contiguous(), dtype=torch.float32)
    others = [torch.full((6,), 9.0) for _ in range(50)]
    found = (ctypes.c_float * 6).from_address(address.value or 0)
    assert list(found) == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0] and others

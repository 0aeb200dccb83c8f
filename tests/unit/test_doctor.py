"""The doctor says what is wrong, with a remedy, and never fails itself."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

from posttrain import doctor, memory
from posttrain.doctor import Check, Report, collect, require_supported_versions, version_checks
from posttrain.errors import MissingDependencyError

GIB = 1 << 30


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache of this test alone, and a matmul probe that takes no time."""
    monkeypatch.setenv("POSTTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "_gflops", lambda dtype: 100.0)
    return tmp_path


def _by_name(report: Report) -> dict[str, Check]:
    return {check.name: check for check in report.checks}


def test_a_report_covers_everything_and_is_json(quick: Path) -> None:
    report = collect(quick / "runs")
    asked = {"python", "cpu", "memory", "matmul", "gpu", "run folder", "cache folder", "models"}
    assert asked | {"worker process", "gloo", "torch", "transformers"} <= set(_by_name(report))
    assert len(_by_name(report)) == len(report.checks)
    again = json.loads(json.dumps(report.to_dict()))
    assert again["status"] == report.status
    assert [check["name"] for check in again["checks"]] == [check.name for check in report.checks]


def test_looking_writes_nothing(quick: Path) -> None:
    collect(quick / "deep" / "runs")
    assert list(quick.iterdir()) == []


def test_a_check_has_a_remedy_exactly_when_it_is_not_ok() -> None:
    for status, remedy in (("ok", "do something"), ("warn", ""), ("fail", "")):
        with pytest.raises(ValueError, match="remedy"):
            Check("x", status, "fact", remedy)  # type: ignore[arg-type]


def test_the_worst_check_is_the_status() -> None:
    ok, warn = Check("a", "ok", ""), Check("b", "warn", "", "r")
    fail = Check("c", "fail", "", "r")
    assert Report(()).status == Report((ok,)).status == "ok"
    assert Report((ok, warn, ok)).status == "warn"
    assert Report((warn, fail, ok)).status == "fail"


def test_a_probe_that_raises_is_a_failed_check_and_the_others_go_on(
    quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Check:
        raise RuntimeError("no such register")

    monkeypatch.setattr(doctor, "_memory", broken)
    checks = _by_name(collect(quick))
    assert checks["memory"].status == "fail"
    assert "RuntimeError: no such register" in checks["memory"].detail
    assert checks["worker process"].status == "ok"


# --- versions: field report i13 -----------------------------------------------------------------


def _neighbours(requirement: Requirement) -> list[str]:
    """One minor version below and one above the range (one major above an open minor range)."""
    outside = []
    for specifier in requirement.specifier:
        major, minor = (*Version(specifier.version).release, 0)[:2]
        if specifier.operator in (">=", "=="):
            outside.append(f"{major}.{minor - 1}" if minor else f"{major - 1}.99")
        if specifier.operator == "==":
            outside.append(f"{major}.{minor + 1}")
        if specifier.operator == "<":
            outside.append(f"{major}.{minor}")
    return outside


def _required() -> list[Requirement]:
    declared = [Requirement(line) for line in importlib.metadata.requires("posttrain") or []]
    return [requirement for requirement in declared if requirement.marker is None]


def _with_version(name: str, version: str) -> Callable[[str], str]:
    return lambda asked: version if asked == name else importlib.metadata.version(asked)


def test_one_minor_version_outside_the_pins_names_the_supported_range() -> None:
    """i13 (modelscope/ms-swift#3470): an upgrade must not surface as an attribute error."""
    required = _required()
    assert len(required) >= 9
    for requirement in required:
        for version in _neighbours(requirement):
            checks = version_checks(_with_version(requirement.name, version))
            bad = [check for check in checks if check.status != "ok"]
            assert [check.name for check in bad] == [requirement.name], version
            assert bad[0].status == "fail"
            assert version in bad[0].detail and str(requirement.specifier) in bad[0].detail
            assert str(requirement.specifier) in bad[0].remedy


def test_the_check_at_the_start_raises_with_range_and_remedy(tmp_path: Path) -> None:
    """i13 once more, with a real installed version that is too new, in a process of its own."""
    info = tmp_path / "transformers-5.20.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 5.20.0\n")
    code = "from posttrain.doctor import require_supported_versions as r; r()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "MissingDependencyError: transformers 5.20.0 is outside the supported" in done.stderr
    assert "pip install 'transformers<5.20" in done.stderr
    require_supported_versions()  # and here all is well


def test_a_missing_required_package_fails_and_a_missing_extra_does_not() -> None:
    def installed(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    declared = ["torch>=2.13,<2.14", 'datasets>=4; extra == "data"', 'ruff>=1; extra == "dev"']
    checks = version_checks(installed, declared)
    assert [(check.name, check.status) for check in checks] == [
        ("torch", "fail"),
        ("datasets", "ok"),
    ]
    assert "pip install 'torch<2.14,>=2.13'" in checks[0].remedy
    assert "posttrain[data]" in checks[1].detail
    assert version_checks(lambda _: "3.0", declared[1:])[0].status == "warn"


def test_a_local_build_of_a_supported_version_is_supported() -> None:
    assert version_checks(lambda _: "2.13.0+cpu", ["torch>=2.13,<2.14"])[0].status == "ok"


def test_a_package_for_another_platform_is_not_asked_for() -> None:
    assert version_checks(lambda _: "1.0", ['x>=2; sys_platform == "plan9"']) == []


def test_an_uninstalled_posttrain_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    with pytest.raises(MissingDependencyError, match="pip install -e"):
        require_supported_versions()


# --- the machine --------------------------------------------------------------------------------


@pytest.mark.parametrize(("bf16", "status"), [(400.0, "ok"), (95.0, "ok"), (10.0, "warn")])
def test_slow_bf16_is_answered_with_the_setting_that_helps(
    bf16: float, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = {torch.bfloat16: bf16, torch.float32: 100.0}
    monkeypatch.setattr(doctor, "_gflops", speeds.__getitem__)
    check = doctor._matmul()
    assert check.status == status
    assert ('model.dtype = "float32"' in check.remedy) == (status == "warn")


def test_a_speed_is_measured_not_assumed() -> None:
    speed = doctor._gflops(torch.float32, size=64, budget_s=0.01)
    assert 0 < speed < 1e6


def test_a_cgroup_limit_below_the_machine_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_group_limits", lambda: iter([2 * GIB]))
    check = doctor._memory()
    assert check.status == "warn" and "2.0 GiB (cgroup limit)" in check.detail
    monkeypatch.setattr(memory, "_group_limits", lambda: iter([1 << 62]))
    assert "cgroup" not in doctor._memory().detail


def test_freed_memory_stays_with_the_process() -> None:
    """glibc takes the settings; other C libraries say no and lose nothing."""
    import platform

    assert memory.keep_freed_memory() == (platform.libc_ver()[0] == "glibc")


@pytest.mark.parametrize(("free", "status"), [(100 * GIB, "ok"), (3 * GIB, "warn"), (1, "fail")])
def test_little_room_is_seen_before_a_run_starts(
    free: int, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    assert doctor._folder("run folder", tmp_path / "runs" / "new").status == status


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    check = doctor._folder("run folder", tmp_path / "file" / "runs")
    assert check.status == "fail" and str(tmp_path / "file") in check.detail
    assert "--run-dir" in check.remedy

    def refuse(**_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    check = doctor._folder("cache folder", tmp_path)
    assert check.status == "fail" and "Permission denied" in check.detail
    assert "POSTTRAIN_CACHE" in check.remedy


def test_models_to_fetch_without_pip_are_a_warning(
    quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doctor._models().status == "ok"
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    check = doctor._models()
    assert check.status == "warn" and "ensurepip" in check.remedy


def test_a_worker_that_does_not_answer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._worker().status == "ok"
    monkeypatch.setattr(doctor.sys, "executable", "/bin/false")
    assert doctor._worker().status == "fail"


def test_gloo_leaves_no_process_group_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._gloo().status == "ok"
    assert not torch.distributed.is_initialized()

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no interface\nlong trace")

    monkeypatch.setattr(torch.distributed, "init_process_group", refuse)
    check = doctor._gloo()
    assert check.status == "warn" and check.detail == "does not start: no interface"

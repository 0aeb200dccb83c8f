"""What one comparison is, and what came out of it.

A check computes the same quantity with our function and with a published one and hands both to a
`Record`. "equal" means equal to rounding. Where conventions differ, the check converts one to the
other, hands the converted pair to `same` and the unconverted one to `apart`: so the stated
difference is the whole difference, and it is still there.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from posttrain.algo.columns import Rule
from posttrain.algo.losses.terms import LossTerms

TOLERANCE = 1e-9  # of float64 sums of some hundred terms
FLOOR = 1e-6  # of a tensor's largest entry: a smaller one is measured against this

PAGES = Path(__file__).parents[2] / "docs" / "algorithms"

Status = Literal["equal", "explained", "DIFFERENT", "NOT DIFFERENT", "NO PAGE", "MISSING", "FAILED"]


@dataclass
class Record:
    """Largest relative differences of what a check handed over."""

    floor: float = FLOOR
    value: float | None = None
    gradient: float | None = None
    unconverted: float | None = None
    num_pairs: int = 0

    def same(self, ours: Tensor | float, theirs: Tensor | float) -> None:
        """Values that must be equal."""
        self.value = max(self.value or 0.0, relative_difference(ours, theirs, self.floor))
        self.num_pairs += 1

    def same_gradient(self, ours: Tensor, theirs: Tensor) -> None:
        """Gradients that must be equal."""
        self.gradient = max(self.gradient or 0.0, relative_difference(ours, theirs, self.floor))
        self.num_pairs += 1

    def apart(self, ours: Tensor | float, theirs: Tensor | float) -> None:
        """The same before conversion: different in at least one batch, or the claim is stale."""
        self.unconverted = max(
            self.unconverted or 0.0, relative_difference(ours, theirs, self.floor)
        )


@dataclass(frozen=True)
class Comparison:
    """ours: path below posttrain.algo; theirs: `package:path`; difference: why they are not the
    same without conversion, "" when they are; page: below docs/algorithms, where that is told;
    tolerance and floor: looser where the published function rounds more than float64 does."""

    ours: str
    theirs: str
    check: Callable[[Record], None]
    difference: str = ""
    page: str = ""
    tolerance: float = TOLERANCE
    floor: float = FLOOR


@dataclass(frozen=True)
class Result:
    """One line of the report."""

    ours: str
    theirs: str
    version: str
    status: Status
    value: float | None
    gradient: float | None
    unconverted: float | None
    num_pairs: int
    tolerance: float
    floor: float
    difference: str
    page: str
    detail: str = ""

    @property
    def is_fine(self) -> bool:
        return self.status in ("equal", "explained")


@dataclass
class Comparisons:
    """All comparisons, in the order in which they were declared."""

    entries: list[Comparison] = field(default_factory=list)

    def add(
        self, ours: str, theirs: str, *, difference: str = "", page: str = "", **settings: Any
    ) -> Callable[[Callable[[Record], None]], Callable[[Record], None]]:
        """Decorator: registers a check."""

        def register(check: Callable[[Record], None]) -> Callable[[Record], None]:
            self.entries.append(Comparison(ours, theirs, check, difference, page, **settings))
            return check

        return register


COMPARISONS = Comparisons()


class MissingRuleError(LookupError):
    """posttrain has no function of that name."""


@dataclass
class Control:
    """With `on`, what our functions return is wrong by a thousandth of itself and of 1: every
    comparison must then be found different. A check that cannot fail would prove nothing."""

    on: bool = False

    def spoiled(self, returned: Any) -> Any:
        if not self.on:
            return returned
        if isinstance(returned, LossTerms):
            return replace(returned, per_token_N=self.spoiled(returned.per_token_N))
        if isinstance(returned, Tensor) and returned.dtype == torch.bool:
            return ~returned
        return returned * 1.001 + 0.001 if isinstance(returned, Tensor | float) else returned


CONTROL = Control()


def function(path: str) -> Callable[..., Any]:
    """Our function: `losses.cispo` is posttrain/algo/losses/cispo.py:cispo, `kl:k3` is k3 in
    posttrain/algo/kl.py. Raises MissingRuleError."""
    module, _, name = path.partition(":")
    full = f"posttrain.algo.{module}"
    try:
        ours = getattr(importlib.import_module(full), name or module.rpartition(".")[2])
    except (ModuleNotFoundError, AttributeError) as error:
        raise MissingRuleError(f"{path}: {error}") from error

    @functools.wraps(ours)
    def called(*args: Any, **settings: Any) -> Any:
        return CONTROL.spoiled(ours(*args, **settings))

    return called


def call(path: str, columns: Mapping[str, Any], **settings: Any) -> Any:
    """Our rule over columns, bound by name as the learner binds it."""
    return Rule(function(path), settings)(columns)


def relative_difference(
    ours: Tensor | float, theirs: Tensor | float, floor: float = FLOOR
) -> float:
    """Largest |a - b| / max(|a|, |b|, floor * largest entry).

    Infinite for unequal shapes and for a NaN on one side.
    """
    a = torch.as_tensor(ours).detach().to(torch.float64)
    b = torch.as_tensor(theirs).detach().to(torch.float64)
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    if bool((a.isnan() != b.isnan()).any()):
        return float("inf")
    a, b = a.nan_to_num(), b.nan_to_num()
    larger = torch.maximum(a.abs(), b.abs())
    smallest = (larger.max() * floor).clamp_min(1e-12)
    return float(((a - b).abs() / torch.maximum(larger, smallest)).max())


def run(comparison: Comparison) -> Result:
    """Run one check."""
    torch.manual_seed(0)  # of what draws without a generator, as verl's clip_cov does
    record = Record(comparison.floor)
    detail = ""
    try:
        comparison.check(record)
        status = _status(comparison, record)
    except MissingRuleError as error:
        status, detail = "MISSING", str(error)
    except Exception:  # boundary: one check that fails must not hide the others; the report has it
        status, detail = "FAILED", traceback.format_exc(limit=-2)
    package = comparison.theirs.partition(":")[0]
    return Result(
        ours=comparison.ours,
        theirs=comparison.theirs,
        version=importlib.metadata.version(package),
        status=status,
        value=record.value,
        gradient=record.gradient,
        unconverted=record.unconverted,
        num_pairs=record.num_pairs,
        tolerance=comparison.tolerance,
        floor=comparison.floor,
        difference=comparison.difference,
        page=comparison.page,
        detail=detail,
    )


def _status(comparison: Comparison, record: Record) -> Status:
    assert record.num_pairs, f"{comparison.theirs}: the check compared nothing"
    if max(record.value or 0.0, record.gradient or 0.0) > comparison.tolerance:
        return "DIFFERENT"
    if comparison.page and not (PAGES / f"{comparison.page}.md").exists():
        return "NO PAGE"
    if not comparison.difference:
        return "equal"
    assert record.unconverted is not None, f"{comparison.theirs}: hand the unconverted pair over"
    return "explained" if record.unconverted > comparison.tolerance else "NOT DIFFERENT"

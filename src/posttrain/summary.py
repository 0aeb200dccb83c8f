"""What a run has to say at its end: summary.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from posttrain.config import Recipe
from posttrain.evaluation.evaluator import compare_reports
from posttrain.journal import Journal, StepRecord


def summarise(recipe: Recipe, journal: Journal, reason: str, wall_s: float) -> dict[str, Any]:
    """JSON-able summary of the run so far; `reason` says how this process ended."""
    steps = [s for s in journal.steps() if s.finished]
    return {
        "name": recipe.name,
        "exit_reason": reason,
        "steps": len(steps),
        "num_steps": recipe.num_steps,
        "skipped_steps": sum(1 for s in steps if s.skipped),
        "weights_hash": steps[-1].weights_hash if steps else None,
        "wall_s": wall_s,
        "training_s": sum(s.metrics.get("time/step_s", 0.0) for s in steps),
        "peak_memory_bytes": int(
            max((s.metrics.get("memory/peak_bytes", 0) for s in steps), default=0)
        ),
        "draws": asdict(journal.ledger()),
        "invalid": invalid_kinds(steps),
        "evaluation": evaluation_summary(journal, recipe.seed),
    }


def invalid_kinds(steps: Iterable[StepRecord]) -> dict[str, int]:
    """Trajectories without a reward over the run, by reason."""
    prefix, kinds = "trajectories/invalid/", Counter[str]()
    for step in steps:
        for name, count in step.metrics.items():
            if name.startswith(prefix):
                kinds[name.removeprefix(prefix)] += int(count)
    return dict(sorted(kinds.items()))


def evaluation_summary(journal: Journal, seed: int) -> dict[str, Any] | None:
    """First against last evaluation, paired by task; None when there was none."""
    records = sorted(journal.evaluations(), key=lambda e: e.policy_version)
    if not records:
        return None
    before, after = records[0].report, records[-1].report
    summary: dict[str, Any] = {"before": _without_tasks(before)}
    if len(records) > 1:
        summary["after"] = _without_tasks(after)
        if before["correct"].keys() & after["correct"].keys():
            summary["comparison"] = compare_reports(before, after, seed)
    return summary


def _without_tasks(report: Any) -> dict[str, Any]:
    return {key: value for key, value in report.items() if key != "correct"}

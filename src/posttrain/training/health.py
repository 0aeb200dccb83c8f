"""Stops a run whose steps no longer move the weights."""

from __future__ import annotations

from posttrain.errors import TrainingError
from posttrain.types import StepResult


def refuse_sick_learner(result: StepResult, max_skipped_steps: int) -> None:
    """Raise TrainingError after `max_skipped_steps` non-finite steps in a row.

    The last of them is journalled before: a resume goes on with the step after it.
    """
    count = int(result.metrics.get("learner/non_finite_in_a_row", 0))
    if count < max_skipped_steps:
        return
    raise TrainingError(
        f"step {result.step}: loss or gradient was not finite {count} times in a row; the weights "
        f"are those of step {result.step - count}. learner/grad_norm in metrics.jsonl shows where "
        "it began. --resume tries the next step; to change optim.lr, export the run and train a "
        "new one from that folder"
    )

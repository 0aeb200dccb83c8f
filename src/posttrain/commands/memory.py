"""What memory a run will need, from a step that was watched.

    peak = what stays resident + what a pass of the largest micro-batch adds + keys of evaluation

A step is watched the second time, since the optimizer's states are made at the end of the first.
What a pass adds grows with its rows; with answers of full length it has more of them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from posttrain.config import Recipe
from posttrain.memory import resident_bytes
from posttrain.types import TrainBatch, TrainSample

_INTERVAL_S = 0.01


@dataclass
class Watched:
    """Resident bytes before something, and the most while it went on."""

    before: int = field(default_factory=resident_bytes)
    peak: int = 0

    @property
    def added(self) -> int:
        return max(self.peak - self.before, 0)


@contextmanager
def watched() -> Iterator[Watched]:
    """Looks at resident memory every few milliseconds."""
    seen, over = Watched(), threading.Event()

    def look() -> None:
        while not over.wait(_INTERVAL_S):
            seen.peak = max(seen.peak, resident_bytes())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()
        seen.peak = max(seen.peak, resident_bytes())


def largest_pass(samples: Sequence[TrainSample], recipe: Recipe, algorithm: Any) -> int:
    """Rows of the largest micro-batch."""
    from posttrain.data.packing import pack

    budget = recipe.learner.max_tokens_per_microbatch
    any_order = not any(component.whole_step for component in algorithm.components)
    micros = pack(samples, budget, whole_groups=algorithm.whole_groups, any_order=any_order)
    return max((micro.num_rows for micro in micros), default=0)


def full_length(batch: TrainBatch, recipe: Recipe) -> int:
    """Rows of the largest micro-batch if every answer had `sampler.max_tokens`: those of today's
    prompts, and of the answers that could have been; the budget cuts what is more."""
    from posttrain.data.prefix_tree import build_prefix_tree

    if recipe.data is not None or not batch.samples:
        return 0
    prompts = [s.token_ids[: int(s.loss_mask.argmax())] for s in batch.samples]
    per_draw = recipe.rollout.group_size * recipe.sampler.max_tokens * recipe.rollout.max_turns
    rows = build_prefix_tree(prompts).num_rows + recipe.rollout.groups_per_step * per_draw
    return min(rows, recipe.learner.max_tokens_per_microbatch)


def most_at_peak(learner: Watched, rows_measured: int, rows_most: int) -> int:
    """Bytes, if the largest pass had `rows_most` rows in place of those measured."""
    scale = max(1.0, rows_most / rows_measured) if rows_measured else 1.0
    return int(learner.before + learner.added * scale)

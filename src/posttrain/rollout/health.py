"""Stops a run that would go on training on what is left after most of it failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from posttrain.errors import RolloutError
from posttrain.protocols import DrawJournal
from posttrain.types import Group, Invalid, TrainBatch


def refuse_sick_batch(
    groups: Sequence[Group], batch: TrainBatch, journal: DrawJournal, max_invalid_frac: float
) -> None:
    """Raise RolloutError when more than `max_invalid_frac` of the episodes are invalid.

    The draws are dropped and journalled first, so that a resume does not meet them again.
    """
    invalid = [t.verdict for g in groups for t in g.siblings if isinstance(t.verdict, Invalid)]
    total = sum(len(g.siblings) for g in groups)
    if len(invalid) <= max_invalid_frac * total:
        return
    for group in groups:
        journal.drop_draw(group.draw.draw_id, "invalid")
    kinds = Counter(v.kind.value for v in invalid)
    kind, count = kinds.most_common(1)[0]
    example = next(v for v in invalid if v.kind.value == kind)
    raise RolloutError(
        f"step {batch.step}: {len(invalid)} of {total} episodes have no reward, {count} of them "
        f"{kind}: {example.reason}. They were not trained as 0. Mend the environment or the reward "
        "and run the same command with --resume, or raise rollout.max_invalid_frac"
    )

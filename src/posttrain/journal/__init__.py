"""The write-ahead log of a run: SQLite for what happened, segment files for token arrays."""

from posttrain.journal.codec import decode_group, encode_group
from posttrain.journal.journal import Journal
from posttrain.journal.records import (
    CheckpointRecord,
    DrawRecord,
    DrawStatus,
    EvaluationRecord,
    EventRecord,
    GroupSummary,
    Ledger,
    RunHeader,
    StepRecord,
)
from posttrain.journal.verify import Problem, verify_segments

__all__ = [
    "CheckpointRecord",
    "DrawRecord",
    "DrawStatus",
    "EvaluationRecord",
    "EventRecord",
    "GroupSummary",
    "Journal",
    "Ledger",
    "Problem",
    "RunHeader",
    "StepRecord",
    "decode_group",
    "encode_group",
    "verify_segments",
]

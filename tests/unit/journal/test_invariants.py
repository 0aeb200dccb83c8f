"""Every draw is trained once, dropped once or open; steps are consecutive and redone exactly."""

from __future__ import annotations

import math
import sqlite3

import numpy as np
import pytest

from posttrain.errors import JournalError, ReplayMismatchError
from posttrain.journal import DrawStatus, Journal, encode_group
from posttrain.types import Draw, StepResult, TrainBatch, TrainSample


@pytest.fixture
def filled(journal, make_draw, make_group) -> Journal:
    """Draws 0 to 3 with groups, draw 4 without."""
    for draw_id in range(5):
        journal.record_draw(make_draw(draw_id))
    for draw_id in range(4):
        journal.record_group(make_group(make_draw(draw_id)))
    return journal


def begin(journal: Journal, step: int, *draw_ids: int, **dropped: str) -> None:
    drops = {int(name[1:]): reason for name, reason in dropped.items()}
    journal.begin_step(TrainBatch(step, (), draw_ids, drops), "fingerprint")


def finish(journal: Journal, step: int, weights_hash: str = "w") -> None:
    journal.finish_step(StepResult(step, step, weights_hash, {}))


def test_a_group_reads_back_as_recorded(filled, make_draw, make_group) -> None:
    for draw_id in range(4):
        expected = make_group(make_draw(draw_id))
        assert encode_group(filled.group(draw_id)) == encode_group(expected)


def test_a_step_closes_each_of_its_draws_in_one_way(filled) -> None:
    begin(filled, 1, 2, 0, 1, _1="zero_variance")
    assert [filled.draw_status(d) for d in range(5)] == [
        DrawStatus.TRAINED,
        DrawStatus.DROPPED,
        DrawStatus.TRAINED,
        DrawStatus.OPEN,
        DrawStatus.OPEN,
    ]
    (step,) = filled.steps()
    assert (step.draw_ids, step.dropped, step.trained) == ((2, 0, 1), {1: "zero_variance"}, (2, 0))
    assert filled.draw(1).step == 1
    ledger = filled.ledger()
    assert (ledger.drawn, ledger.trained, ledger.open) == (5, 2, 2)
    assert ledger.dropped == {"zero_variance": 1}
    assert ledger.balanced


def test_open_draws_say_whether_their_group_is_recorded(filled, make_draw) -> None:
    begin(filled, 1, 0)
    filled.drop_draw(2, "stale")
    assert filled.open_draws() == [
        (make_draw(1), True),
        (make_draw(3), True),
        (make_draw(4), False),
    ]
    assert filled.next_draw_id() == 5


def test_the_summary_of_a_group_needs_no_arrays(filled, make_draw, make_group) -> None:
    filled.record_group(make_group(make_draw(4), policy_version=6))
    summary = filled.draw(4).group
    assert (summary.num_trajectories, summary.num_valid, summary.reward_mean) == (2, 2, 0.5)
    assert (summary.min_policy_version, summary.max_policy_version) == (6, 6)
    assert filled.draw(3).group.num_valid == 1  # draw 3 has an invalid member
    assert filled.draw(3).group.reward_mean == 0.0


def test_a_draw_is_recorded_once(filled, make_draw) -> None:
    with pytest.raises(JournalError, match=r"draw 2 is recorded already; the next free .* is 5"):
        filled.record_draw(make_draw(2))


def test_a_group_is_recorded_once(filled, make_draw, make_group) -> None:
    before = filled.ledger()
    with pytest.raises(JournalError, match="group of draw 1 is recorded already"):
        filled.record_group(make_group(make_draw(1)))
    assert filled.ledger() == before


def test_a_group_needs_its_draw(filled, make_draw, make_group) -> None:
    with pytest.raises(JournalError, match="draw 9 was never recorded"):
        filled.record_group(make_group(make_draw(9)))


def test_a_group_carries_the_draw_that_was_recorded(filled, make_draw, make_group) -> None:
    other = Draw(4, "another task", 0, 1)
    with pytest.raises(JournalError, match="another task"):
        filled.record_group(make_group(other))
    filled.record_group(make_group(make_draw(4)))


def test_a_trained_draw_is_closed(filled, make_draw, make_group) -> None:
    begin(filled, 1, 0)
    finish(filled, 1)
    with pytest.raises(JournalError, match=r"draw 0 was trained at step 1 and cannot be dropped"):
        filled.drop_draw(0, "stale")
    with pytest.raises(JournalError, match=r"draw 0 was trained at step 1 and cannot be trained"):
        begin(filled, 2, 0)
    with pytest.raises(JournalError, match=r"draw 0 was trained at step 1"):
        filled.record_group(make_group(make_draw(0)))


def test_a_dropped_draw_is_closed(filled) -> None:
    filled.drop_draw(0, "stale")
    with pytest.raises(JournalError, match=r"draw 0 was dropped \(stale\) and cannot be trained"):
        begin(filled, 1, 0)
    with pytest.raises(JournalError, match=r"draw 0 was dropped \(stale\) and cannot be dropped"):
        filled.drop_draw(0, "again")
    assert filled.draw(0).reason == "stale"


def test_a_drop_says_why(filled) -> None:
    with pytest.raises(JournalError, match="the reason is empty"):
        filled.drop_draw(0, "")


def test_a_draw_without_group_cannot_be_trained_but_dropped(filled) -> None:
    with pytest.raises(JournalError, match="draw 4 has no recorded group"):
        begin(filled, 1, 3, 4)
    assert filled.draw_status(3) == DrawStatus.OPEN  # nothing of a refused step remains
    assert filled.steps() == []
    begin(filled, 1, 3, 4, _4="timeout")


@pytest.mark.parametrize(
    ("batch", "fact"),
    [
        (TrainBatch(1, (), (0, 0)), "takes a draw twice"),
        (TrainBatch(1, (), (0,), {1: "stale"}), r"drops draws \[1\] that it did not take"),
        (TrainBatch(1, (), (9,)), "draw 9 was never recorded"),
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(filled, batch, fact) -> None:
    with pytest.raises(JournalError, match=fact):
        filled.begin_step(batch, "fingerprint")
    assert filled.ledger().open == 5


@pytest.mark.parametrize("stranger", [1, 2])
def test_samples_come_from_trained_draws_only(filled, stranger) -> None:
    arrays = (np.zeros(1, np.bool_), np.zeros(1, np.float32))
    ids = np.zeros(1, np.int32)
    sample = TrainSample(ids, arrays[0], arrays[1], ids, ids, {}, stranger, 0)
    batch = TrainBatch(1, (sample,), (0, 1), {1: "stale"})
    with pytest.raises(JournalError, match=rf"samples of draws \[{stranger}\]"):
        filled.begin_step(batch, "fingerprint")


@pytest.mark.parametrize("step", [0, 2, -1])
def test_the_first_step_is_1(filled, step) -> None:
    with pytest.raises(JournalError, match="the next is 1"):
        begin(filled, step, 0)


def test_a_step_begins_when_the_one_before_is_finished(filled) -> None:
    begin(filled, 1, 0)
    with pytest.raises(JournalError, match="step 2 cannot begin while step 1 is unfinished"):
        begin(filled, 2, 1)
    finish(filled, 1)
    with pytest.raises(JournalError, match="the next is 2"):
        begin(filled, 3, 1)
    begin(filled, 2, 1)


def test_a_step_that_never_began_cannot_finish(filled) -> None:
    with pytest.raises(JournalError, match="step 1 was never begun"):
        finish(filled, 1)


def test_the_redo_of_an_unfinished_step_is_accepted(filled) -> None:
    begin(filled, 1, 0, 1, _1="stale")
    begin(filled, 1, 0, 1, _1="stale")
    finish(filled, 1)
    assert filled.ledger().trained == 1


def test_the_redo_of_a_finished_step_is_accepted_and_changes_nothing(filled) -> None:
    begin(filled, 1, 0)
    filled.finish_step(StepResult(1, 1, "w", {"learner/loss": 1.0}))
    begin(filled, 2, 1)
    finish(filled, 2)
    before = filled.steps()
    begin(filled, 1, 0)
    filled.finish_step(StepResult(1, 1, "w", {"learner/loss": 2.0}))
    assert filled.steps() == before


@pytest.mark.parametrize(
    ("batch", "fingerprint", "fact"),
    [
        (TrainBatch(1, (), (1, 0)), "fingerprint", r"draws \(1, 0\), recorded \(0, 1\)"),
        (TrainBatch(1, (), (0, 1), {1: "stale"}), "fingerprint", r"dropped \{1: 'stale'\}"),
        (TrainBatch(1, (), (0, 1)), "other", "fingerprint 'other', recorded 'fingerprint'"),
    ],
)
def test_a_redo_with_another_batch_is_refused(filled, batch, fingerprint, fact) -> None:
    begin(filled, 1, 0, 1)
    with pytest.raises(JournalError, match=fact):
        filled.begin_step(batch, fingerprint)


def test_a_redo_that_gives_other_weights_names_step_and_hashes(filled) -> None:
    begin(filled, 1, 0)
    finish(filled, 1, "recorded-hash")
    with pytest.raises(ReplayMismatchError, match=r"step 1 .*recorded-hash.*redone-hash"):
        finish(filled, 1, "redone-hash")
    assert filled.steps()[0].weights_hash == "recorded-hash"


def test_non_finite_metrics_survive(filled) -> None:
    metrics = {"a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": np.float32(0.1)}
    filled.begin_step(TrainBatch(1, (), (0,), {}, metrics), "fingerprint")
    filled.finish_step(StepResult(1, 1, "w", metrics, skipped="non-finite gradient"))
    (step,) = filled.steps()
    for found in (step.metrics, step.batch_metrics):
        assert math.isnan(found["a"])
        assert (found["b"], found["c"], found["d"]) == (math.inf, -math.inf, float(np.float32(0.1)))
    assert (step.skipped, step.finished, step.policy_version) == ("non-finite gradient", True, 1)


def test_a_metric_that_is_no_number_is_named(filled) -> None:
    begin(filled, 1, 0)
    with pytest.raises(JournalError, match="step 1: metrics cannot be recorded"):
        filled.finish_step(StepResult(1, 1, "w", {"a": object()}))  # type: ignore[dict-item]
    finish(filled, 1)


def test_steps_can_be_read_from_any_step_on(journal, make_steps) -> None:
    make_steps(journal, 4)
    assert [s.step for s in journal.steps(after=2)] == [3, 4]
    assert [s.step for s in journal.steps(after=1, limit=2)] == [2, 3]
    assert journal.last_finished_step() == 4


def test_a_checkpoint_belongs_to_a_finished_step(filled) -> None:
    filled.record_checkpoint(0, "checkpoints/step-0", "initial")
    begin(filled, 1, 0)
    with pytest.raises(JournalError, match="the last finished step is 0"):
        filled.record_checkpoint(1, "checkpoints/step-1", "one")
    finish(filled, 1)
    filled.record_checkpoint(1, "checkpoints/step-1", "one")
    filled.record_checkpoint(1, "checkpoints/step-1", "one again")
    filled.forget_checkpoint(0)
    with pytest.raises(JournalError, match="no checkpoint of step 0"):
        filled.forget_checkpoint(0)
    assert [(c.step, c.state_hash) for c in filled.checkpoints()] == [(1, "one again")]


def test_evaluations_and_their_groups_read_back(journal, make_draw, make_group) -> None:
    first, again = make_group(make_draw(0)), make_group(make_draw(0), size=3)
    journal.record_eval_group(0, first)
    journal.record_eval_group(2, make_group(make_draw(1)))
    journal.record_eval_group(0, again)  # an evaluation that a crash interrupted starts again
    journal.record_evaluation(2, {"accuracy": 0.5})
    journal.record_evaluation(0, {"accuracy": float("nan")})
    journal.record_evaluation(0, {"accuracy": 0.25, "interval": [0.1, 0.4]})
    assert [(e.policy_version, e.report["accuracy"]) for e in journal.evaluations()] == [
        (0, 0.25),
        (2, 0.5),
    ]
    assert [encode_group(g) for g in journal.eval_groups(0)] == [encode_group(again)]
    assert journal.ledger().drawn == 0  # evaluation draws count apart


def test_events_are_kept_in_order(journal) -> None:
    journal.record_event("alarm", {"metric": "policy/lag_max", "value": float("inf")})
    journal.record_event("restart", {"reason": "\ud800 from a model"})
    assert [e.kind for e in journal.events()] == ["alarm", "restart"]
    (alarm,) = journal.events("alarm")
    assert alarm.payload == {"metric": "policy/lag_max", "value": math.inf}


def test_a_task_id_that_sqlite_cannot_keep_is_refused(journal) -> None:
    with pytest.raises(JournalError, match="not valid Unicode"):
        journal.record_draw(Draw(0, "\ud800", 0, 1))
    with pytest.raises(JournalError, match="64-bit"):
        journal.record_draw(Draw(0, "t", 0, 2**63))
    assert journal.next_draw_id() == 0


@pytest.mark.parametrize(
    ("statement", "rule"),
    [
        ("UPDATE draws SET status='dropped', reason='x' WHERE draw_id=0", "trained once or drop"),
        ("UPDATE draws SET status='open', step=NULL WHERE draw_id=0", "trained once or dropped"),
        ("DELETE FROM draws WHERE draw_id=3", "never deleted"),
        ("UPDATE draws SET status='trained', step=1, position=9 WHERE draw_id=4", "without a rec"),
        ("UPDATE draws SET status='dropped' WHERE draw_id=3", "CHECK"),
        ("UPDATE draws SET status='lost' WHERE draw_id=3", "CHECK"),
        ("UPDATE groups SET offset=7 WHERE draw_id=1", "never changes"),
        ("DELETE FROM groups WHERE draw_id=0", "never deleted"),
        ("INSERT INTO groups SELECT 99,1,9999,1,sha256,1,1,1,0,0,0 FROM groups", "open draw"),
        (
            "INSERT INTO steps (step,fingerprint,batch_metrics,begun_at_s) VALUES (5,'','',0)",
            "count",
        ),
        ("UPDATE steps SET weights_hash='other'", "finished once"),
        ("DELETE FROM steps", "never deleted"),
    ],
)
def test_sqlite_itself_enforces_the_rules(filled, run_dir, statement, rule) -> None:
    begin(filled, 1, 0)
    finish(filled, 1)
    filled.close()
    connection = sqlite3.connect(run_dir / "journal.sqlite")
    try:
        with pytest.raises(sqlite3.IntegrityError, match=rule):
            connection.execute(statement)
    finally:
        connection.close()

"""What the single benchmarks compute from what they measure."""

from __future__ import annotations

import argparse

from posttrain.benchmarks import loop_overhead, resume, train_step
from posttrain.benchmarks.report import Report, this_machine


def test_the_parts_of_a_step_add_up_to_its_wall_time() -> None:
    step = loop_overhead.Step(
        number=2,
        wall_s=10.0,
        metrics={
            "time/rollout_s": 5.0,
            "time/learner_s": 4.0,
            "sampler/busy_s": 4.5,
            "learner/step_s": 3.75,
        },
        checkpoint=False,
    )
    assert (step.other_s, step.hash_s, step.beside_engine_s) == (1.0, 0.25, 0.5)
    assert step.strict_s == step.other_s + step.hash_s + step.beside_engine_s


def test_without_sharing_every_token_is_a_row_and_the_work_is_the_same() -> None:
    args = argparse.Namespace(
        groups=3, group_size=2, prompt_tokens=6, shared_tokens=4, max_tokens=1000
    )
    shared = train_step.shared_samples(args, completion=5, vocab=50_000)
    alone = train_step.without_sharing(shared, vocab=50_000)
    assert train_step.num_rows(alone, 1000) == sum(len(s) for s in shared) == 6 * 11
    assert train_step.num_rows(shared, 1000) == 4 + 3 * 2 + 6 * 5
    for a, b in zip(shared, alone, strict=True):
        assert a.num_loss_tokens == b.num_loss_tokens == 5
        assert (a.token_ids[1:] == b.token_ids[1:]).all()


def test_a_resume_is_compared_with_what_its_own_steps_took() -> None:
    report = Report("resume", "", "", "", "", this_machine(threads=1), {})
    cost = resume.Regeneration(checkpoint=5, num_steps=2, num_timed=2, rollout_s=9.0, learner_s=3.0)
    resumes = [resume.Resume(start_up_s=1.0, restore_s=0.5, redo_s=4.5)] * 2
    resume.add_results(report, resumes, cost)
    found = {m.name.strip(): m.median for m in report.measures}
    assert found["regenerating over the whole resume"] == 12.0 / 6.0
    assert found["redo over the learner alone"] == 4.5 / 3.0

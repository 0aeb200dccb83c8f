"""Evaluation statistics: the edges where a wrong one looks right."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.evaluation.statistics import (
    avg_at_k,
    bootstrap_interval,
    compare_paired,
    mcnemar_exact,
    mean_over_questions,
    pass_at_k,
    pass_hat_k,
    rule_of_three,
    wilson,
)
from posttrain.evaluation.student_t import t_central_mass, t_quantile
from posttrain.types import Scored


def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def test_pass_at_all_samples_is_one_when_any_is_correct():
    """Report k01: 1 of 4 gives 0.25, 0.5 and 1.0; a bootstrap says 0.684 for the last."""
    assert [pass_at_k(4, 1, k) for k in (1, 2, 4)] == [0.25, 0.5, 1.0]


def test_a_pass_is_decided_by_the_verdict_of_the_trajectory():
    """Report k05: of two rollouts one ends correct: pass@1 = 0.5 and pass@2 = 1."""
    verdicts = [Scored(1.0), Scored(0.0)]
    num_correct = sum(verdict.correct for verdict in verdicts)
    assert [pass_at_k(2, num_correct, k) for k in (1, 2)] == [0.5, 1.0]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_success(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    outcomes = [True] * c + [False] * (n - c)
    subsets = list(itertools.combinations(outcomes, k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    assert pass_hat_k(n, c, k) == pytest.approx(sum(map(all, subsets)) / len(subsets))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1), (0, 0, 1)])
def test_impossible_counts_are_refused(n, c, k):
    for estimator in (pass_at_k, pass_hat_k):
        with pytest.raises(ValueError):
            estimator(n, c, k)


def test_pass_at_k_of_many_samples_does_not_overflow():
    assert 0.99 < pass_at_k(4000, 20, 1000) < 1.0


def test_a_single_question_has_a_mean_and_no_error_bar():
    estimate = avg_at_k([[1.0, 0.0, 1.0, 1.0]])
    assert (estimate.mean, estimate.se, estimate.interval) == (0.75, None, None)
    assert estimate.num_questions == 1


def test_few_questions_get_the_wide_interval_of_student():
    estimate = avg_at_k([[0.0], [1.0], [1.0]])
    margin = 4.302652730 * math.sqrt(1 / 3) / math.sqrt(3)
    assert estimate.interval.high - estimate.mean == pytest.approx(margin, abs=1e-8)
    assert estimate.mean - estimate.interval.low == pytest.approx(margin, abs=1e-8)


def test_copies_of_a_sample_do_not_make_a_score_surer():
    once, often = avg_at_k([[1.0], [0.0], [1.0]]), avg_at_k([[1.0] * 9, [0.0] * 9, [1.0] * 9])
    assert once == often


def test_questions_weigh_the_same_however_many_samples_they_have():
    assert avg_at_k([[1.0], [0.0] * 99]).mean == 0.5


def test_an_empty_evaluation_is_refused():
    with pytest.raises(ValueError, match="no questions"):
        avg_at_k([])
    with pytest.raises(ValueError, match="no valid sample"):
        avg_at_k([[1.0], []])


@pytest.mark.parametrize(
    ("probability", "degrees", "expected"),
    [
        (0.975, 1, 12.7062047362),
        (0.975, 2, 4.3026527297),
        (0.975, 3, 3.1824463053),
        (0.975, 4, 2.7764451052),
        (0.995, 5, 4.0321429836),
        (0.975, 30, 2.0422724563),
        (0.5, 7, 0.0),
    ],
)
def test_student_quantiles_are_those_of_the_tables(probability, degrees, expected):
    assert t_quantile(probability, degrees) == pytest.approx(expected, abs=1e-8)


def test_student_quantiles_join_where_the_expansion_takes_over():
    for probability in (0.95, 0.975, 0.995):
        mass = t_central_mass(t_quantile(probability, 201), 201)
        assert mass == pytest.approx(2 * probability - 1, abs=1e-8)
    assert t_quantile(0.975, 10**6) == pytest.approx(1.959966, abs=1e-5)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 60), st.integers(0, 60))
def test_wilson_holds_the_rate_and_stays_within_zero_and_one(successes, failures):
    trials = successes + failures
    interval = wilson(successes, trials)
    assert 0.0 <= interval.low <= interval.high <= 1.0
    if trials:
        assert interval.low <= successes / trials <= interval.high
    mirrored = wilson(failures, trials)
    assert mirrored.low == pytest.approx(1 - interval.high, abs=1e-12)


def test_no_events_in_few_trials_bound_nothing():
    assert rule_of_three(0) == rule_of_three(2) == 1.0


def test_the_bootstrap_resamples_questions_and_follows_its_generator():
    means = list(rng().random(60))
    interval = bootstrap_interval(means, np.random.default_rng(1))
    assert interval == bootstrap_interval(means, np.random.default_rng(1))
    estimate = mean_over_questions(means)
    assert interval.low == pytest.approx(estimate.interval.low, abs=0.01)
    assert interval.high == pytest.approx(estimate.interval.high, abs=0.01)
    assert bootstrap_interval([0.5], rng()) is None


def test_the_number_of_resamples_need_not_fill_whole_chunks():
    interval = bootstrap_interval([0.0, 1.0], rng(), num_resamples=1500)
    assert (interval.low, interval.high) == (0.0, 1.0)


def test_a_comparison_needs_the_same_questions_on_both_sides():
    with pytest.raises(ValueError, match=r"2 questions are on one side only \(b, c\)"):
        compare_paired({"a": [1.0], "b": [1.0]}, {"a": [1.0], "c": [1.0]}, rng())


def test_pairs_are_matched_by_question_and_not_by_order():
    before = {"a": [0.0], "b": [1.0]}
    result = compare_paired(before, {"b": [1.0], "a": [1.0]}, rng())
    assert (result.num_better, result.num_worse, result.mean_diff) == (1, 0, 0.5)


def test_pairing_sees_a_gain_that_two_separate_error_bars_hide():
    hard = {str(i): [0.1 * i] for i in range(10)}
    result = compare_paired(hard, {q: [s[0] + 0.01] for q, s in hard.items()}, rng())
    assert result.se < 1e-9
    assert result.test == "sign_flip_exact"
    assert result.p_value == pytest.approx(2 / 2**10)
    assert avg_at_k(list(hard.values())).se > 0.05


def test_graded_scores_of_many_questions_use_drawn_sign_flips_that_repeat():
    before = {str(i): [0.5, 0.25] for i in range(40)}
    after = {q: [0.5, 0.75] for q in before}
    first = compare_paired(before, after, np.random.default_rng(2), num_flips=2500)
    assert first == compare_paired(before, after, np.random.default_rng(2), num_flips=2500)
    assert first.test == "sign_flip_sampled"
    assert first.p_value == pytest.approx(1 / 2501)


def test_drawn_sign_flips_agree_with_all_of_them():
    diffs = [0.3, -0.1, 0.2, 0.4, -0.2, 0.1, 0.05, 0.0, 0.15, -0.3]
    exact = compare_paired(
        {str(i): [0.5] for i in range(10)},
        {str(i): [0.5 + d] for i, d in enumerate(diffs)},
        rng(),
    )
    padded = compare_paired(
        {str(i): [0.5] for i in range(20)},
        {str(i): [0.5 + d] for i, d in enumerate(diffs + [0.0] * 10)},
        rng(),
    )
    assert (exact.test, padded.test) == ("sign_flip_exact", "sign_flip_sampled")
    assert padded.p_value == pytest.approx(exact.p_value, abs=0.02)


def test_no_change_is_no_evidence():
    same = {str(i): [0.5, 1.0] for i in range(5)}
    result = compare_paired(same, same, rng())
    assert (result.mean_diff, result.se, result.p_value) == (0.0, 0.0, 1.0)
    assert mcnemar_exact(0, 0) == 1.0


def test_mcnemar_is_the_exact_binomial():
    assert mcnemar_exact(8, 0) == pytest.approx(2 / 2**8)
    assert mcnemar_exact(9, 1) == pytest.approx(2 * 11 / 2**10)
    assert mcnemar_exact(1, 9) == mcnemar_exact(9, 1)


def test_one_question_before_and_after_has_no_error_bar():
    result = compare_paired({"a": [0.0]}, {"a": [1.0]}, rng())
    assert (result.se, result.interval, result.p_value) == (None, None, 1.0)

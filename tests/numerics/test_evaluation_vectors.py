"""Hand values of the evaluation statistics."""

from __future__ import annotations

import numpy as np
import pytest

from posttrain.evaluation import statistics


def test_pass_at_k(vector):
    case = vector("pass_at_k")
    results = [statistics.pass_at_k(n, c, k) for n, c, k in case["inputs"]["cases"]]
    assert results == pytest.approx(case["expected"], abs=case["tolerance"])


def test_pass_hat_k(vector):
    case = vector("pass_hat_k")
    result = statistics.pass_hat_k(case["inputs"]["n"], case["inputs"]["c"], case["inputs"]["k"])
    assert result == pytest.approx(case["expected"]["pass_hat_k"], abs=case["tolerance"])


def test_wilson_interval(vector):
    case = vector("wilson_ci")
    for (successes, trials), expected in zip(
        case["inputs"]["cases"], case["expected"], strict=True
    ):
        interval = statistics.wilson(successes, trials)
        assert [interval.low, interval.high] == pytest.approx(expected, abs=case["tolerance"])


def test_average_and_its_error_clustered_by_question(vector):
    case = vector("avg_at_k_se")
    scores, expected = case["inputs"]["scores"], case["expected"]
    estimate = statistics.avg_at_k(scores)
    assert estimate.mean == pytest.approx(expected["avg"], abs=1e-9)
    assert estimate.se == pytest.approx(expected["se_question_clustered"], abs=1e-9)
    assert estimate.se**2 == pytest.approx(expected["var_of_mean_total"], abs=1e-9)


def test_paired_comparison(vector):
    case = vector("paired_comparison")
    after = {str(i): [score] for i, score in enumerate(case["inputs"]["A"])}
    before = {str(i): [score] for i, score in enumerate(case["inputs"]["B"])}
    result = statistics.compare_paired(before, after, np.random.default_rng(0))
    expected = case["expected"]
    assert result.mean_diff == pytest.approx(expected["mean_diff"], abs=1e-9)
    assert result.se == pytest.approx(expected["se_paired"], abs=1e-9)
    assert (result.num_better, result.num_worse) == (expected["b"], expected["c"])
    assert result.test == "mcnemar_exact"
    assert result.p_value == expected["mcnemar_exact_p"]


def test_zero_events(vector):
    case = vector("rule_of_three")
    trials, expected = case["inputs"]["n"], case["expected"]
    assert statistics.rule_of_three(trials) == pytest.approx(expected["upper95"], abs=1e-9)


def test_sample_size_to_see_five_points(vector):
    case = vector("sample_size")
    inputs = case["inputs"]
    size = statistics.sample_size_per_arm(
        inputs["p"], inputs["delta"], alpha=inputs["alpha"], power=inputs["power"]
    )
    assert size == case["expected"]["n_per_arm"]
    # Half the difference needs four times as many.
    assert statistics.sample_size_per_arm(0.5, 0.025) == pytest.approx(4 * size, rel=1e-3)


@pytest.mark.parametrize(("rate", "difference"), [(0.0, 0.1), (1.0, 0.1), (0.5, 0.0)])
def test_a_sample_size_that_cannot_be_had_is_refused(rate, difference):
    with pytest.raises(ValueError, match="need 0 < rate < 1"):
        statistics.sample_size_per_arm(rate, difference)

"""Coefficients that follow a measurement."""

from __future__ import annotations

import pytest

from posttrain.algo.controllers import adapted_kl_coef, entropy_coef


def test_the_kl_coefficient_follows_the_target(vector):
    case = vector("kl_adaptive_controller")
    inputs, coef, found = case["inputs"], case["inputs"]["init"], []
    for observed in inputs["observed_kl"]:
        coef = adapted_kl_coef(
            coef, observed, inputs["n_steps"], target=inputs["target"], horizon=inputs["horizon"]
        )
        found.append(coef)
    assert found == pytest.approx(case["expected"], abs=case["tolerance"])


@pytest.mark.parametrize("observed", [0.0, -3.0, 1e-9, 1e9])
@pytest.mark.parametrize("num_sequences", [1, 100, 10_000])
def test_the_kl_coefficient_stays_positive_and_moves_a_fifth_at_most(observed, num_sequences):
    coef = adapted_kl_coef(0.1, observed, num_sequences, target=0.05, horizon=100)
    assert 0.08 - 1e-12 <= coef <= 0.12 + 1e-12
    assert (coef > 0.1) == (observed > 0.05)


def test_on_target_and_without_sequences_nothing_changes():
    assert adapted_kl_coef(0.1, 6.0, 256, target=6.0, horizon=100) == 0.1
    assert adapted_kl_coef(0.1, 60.0, 0, target=6.0, horizon=100) == 0.1


def test_the_adaptation_settles_where_the_kl_is_on_target():
    coef = 1.0
    for _ in range(3000):
        coef = adapted_kl_coef(coef, 0.1 / coef, 10, target=0.4, horizon=100)
    assert coef == pytest.approx(0.25, rel=1e-6)


def test_the_entropy_bonus_acts_only_below_its_target():
    """The edge belongs to the bonus, as in arXiv:2505.22312."""
    found = [entropy_coef(h, coef=0.01, target=0.2) for h in (0.0, 0.2, 0.201, 5.0)]
    assert found == [0.01, 0.01, 0.0, 0.0]
    assert entropy_coef(5.0, coef=0.01, target=None) == 0.01

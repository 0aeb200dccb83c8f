"""KL estimators: values, expectations, and what each one's gradient really minimises."""

from __future__ import annotations

import pytest
import torch

from posttrain.algo import kl

ESTIMATORS = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3}


def test_values_and_expectations_of_the_estimators(vector, dtype, matches):
    case = vector("kl_estimators_tabular")
    pi = torch.tensor(case["inputs"]["pi"], dtype=dtype)
    ref = torch.tensor(case["inputs"]["ref"], dtype=dtype)
    for name, estimator in ESTIMATORS.items():
        values = estimator(pi.log() - ref.log())
        matches(values, case["expected"][f"per_action_{name}"], case["tolerance"])
        matches((pi * values).sum(), case["expected"][f"E_{name}"], case["tolerance"])


@pytest.mark.parametrize(
    ("key", "per_token"),
    [
        ("grad_k1_as_loss", lambda x, _: kl.k1(x)),
        ("grad_k2_as_loss", lambda x, _: kl.k2(x)),
        ("grad_k3_as_loss", lambda x, _: kl.k3(x)),
        ("grad_IS_k3_as_loss", lambda x, logp: (logp - logp.detach()).exp() * kl.k3(x)),
        ("grad_k1_in_reward", lambda x, logp: kl.k1(x).detach() * logp),
    ],
)
def test_expected_gradients_of_each_use(key, per_token, vector, dtype, matches):
    case = vector("kl_estimators_tabular")
    logits = torch.tensor(case["inputs"]["pi"], dtype=dtype).log().requires_grad_(True)
    logp = logits.log_softmax(-1)
    ref = torch.tensor(case["inputs"]["ref"], dtype=dtype).log()
    # On-policy: actions are drawn from pi, which is a constant of the expectation.
    loss = (logp.detach().exp() * per_token(logp - ref, logp)).sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    matches(gradient, case["expected"][key], case["tolerance"])


def test_k3_of_a_small_ratio_keeps_its_digits_in_float32():
    x = torch.tensor([1e-3, -1e-4, 1e-5])
    exact = x.double() ** 2 / 2 - x.double() ** 3 / 6
    assert torch.allclose(kl.k3(x).double(), exact, rtol=1e-2, atol=1e-12)
    assert (kl.k3(x) >= 0).all()
    naive = (-x).exp() - 1 + x
    assert not torch.allclose(naive.double(), exact, rtol=1e-2, atol=1e-12)


def test_every_estimator_is_zero_between_equal_policies():
    zero = torch.zeros(3)
    for estimator in ESTIMATORS.values():
        assert estimator(zero).tolist() == [0.0, 0.0, 0.0]

"""KL estimators: values, expectations, and what each one's gradient really minimises."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch

from posttrain.algo import kl
from posttrain.algo.groups import centred
from posttrain.algo.ratios import mismatch_k3

ESTIMATORS = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3}


def test_values_and_expectations_of_the_estimators(vector, dtype, matches):
    case = vector("kl_estimators_tabular")
    pi = torch.tensor(case["inputs"]["pi"], dtype=dtype)
    ref = torch.tensor(case["inputs"]["ref"], dtype=dtype)
    for name, estimator in ESTIMATORS.items():
        values = estimator(pi.log() - ref.log())
        matches(values, case["expected"][f"per_action_{name}"], case["tolerance"])
        matches((pi * values).sum(), case["expected"][f"E_{name}"], case["tolerance"])


PerToken = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def as_loss(estimator: kl.Estimator) -> PerToken:
    return lambda policy, ref: kl.kl_loss(policy, ref, estimator)


def in_reward(policy: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """k1 subtracted from the reward: REINFORCE with -k1."""
    return kl.k1(policy - ref).detach() * policy


USES: dict[str, PerToken] = {
    "k1": as_loss("k1"),
    "k2": as_loss("k2"),
    "k3": as_loss("k3"),
    "IS_k3": as_loss("k3_weighted"),
}


def expected_gradient(
    logits: torch.Tensor, ref: torch.Tensor, per_token: PerToken, reward: torch.Tensor | None = None
) -> torch.Tensor:
    """Of E_pi[per_token - reward], actions drawn on-policy: the expectation is exact."""
    logits = logits.detach().requires_grad_(True)
    policy = logits.log_softmax(-1)
    terms = per_token(policy, ref)
    if reward is not None:
        terms = terms - reward * policy
    return torch.autograd.grad((policy.detach().exp() * terms).sum(), logits)[0]


@pytest.mark.parametrize(
    ("key", "per_token"),
    [*((f"grad_{n}_as_loss", use) for n, use in USES.items()), ("grad_k1_in_reward", in_reward)],
)
def test_expected_gradients_of_each_use(key, per_token, vector, dtype, matches):
    case = vector("kl_estimators_tabular")
    logits, ref = (torch.tensor(case["inputs"][k], dtype=dtype).log() for k in ("pi", "ref"))
    gradient = expected_gradient(logits, ref, per_token)
    matches(gradient, case["expected"][key], case["tolerance"])


def test_only_k3_as_a_loss_follows_the_other_divergence(vector, dtype, matches):
    case = vector("kl_estimators_tabular")
    logits, ref = (torch.tensor(case["inputs"][k], dtype=dtype).log() for k in ("pi", "ref"))
    logits.requires_grad_(True)
    policy = logits.log_softmax(-1)
    forward, backward = (policy.exp() * (policy - ref)).sum(), (ref.exp() * (ref - policy)).sum()
    matches(forward, case["expected"]["KL_pi_ref"], case["tolerance"])
    matches(backward, case["expected"]["KL_ref_pi"], case["tolerance"])
    for value, key in ((forward, "grad_KL_pi_ref"), (backward, "grad_KL_ref_pi")):
        (gradient,) = torch.autograd.grad(value, logits, retain_graph=True)
        matches(gradient, case["expected"][key], case["tolerance"])
    expected = case["expected"]
    assert expected["grad_k3_as_loss"] == expected["grad_KL_ref_pi"] != expected["grad_KL_pi_ref"]


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3_weighted"])
def test_the_value_of_the_loss_is_that_of_the_estimator(estimator, dtype):
    policy, ref = torch.tensor([-1.0, -2.0, -0.5], dtype=dtype), torch.tensor([-1.5, -0.3, -0.5])
    value = ESTIMATORS[estimator.removesuffix("_weighted")](policy - ref.to(dtype))
    assert torch.equal(kl.kl_loss(policy, ref.to(dtype), estimator), value)


def test_gradients_per_token_are_those_of_finite_differences():
    policy = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.5, -0.3, -0.6], dtype=torch.float64)
    prox = torch.tensor([-1.1, -1.8, -0.5], dtype=torch.float64)
    for name in ("k1", "k2", "k3", "k3_weighted"):
        assert torch.autograd.gradcheck(
            lambda p, name=name: kl.kl_loss(p, ref, name, prox), (policy,)
        )


def test_weighted_k3_has_the_gradient_of_k2_on_policy_and_the_ratio_times_it_elsewhere(dtype):
    """d(e^y k3)/dy at y = log policy - log prox: e^y (k3 + 1 - e^-x) = e^y x."""
    policy = torch.tensor([-1.0, -2.0, -0.5], dtype=dtype, requires_grad=True)
    ref = torch.tensor([-1.5, -0.3, -0.6], dtype=dtype)
    prox = torch.tensor([-1.1, -1.8, -0.5], dtype=dtype)

    def gradient(estimator: kl.Estimator, *anchor: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(kl.kl_loss(policy, ref, estimator, *anchor).sum(), policy)[0]

    k2 = gradient("k2")
    assert torch.allclose(k2, (policy - ref).detach())
    assert torch.allclose(gradient("k3_weighted"), k2, atol=1e-6)
    ratio = (policy - prox).detach().exp()
    assert torch.allclose(gradient("k3_weighted", prox), ratio * k2, atol=1e-6)


def test_weighted_k3_stays_right_on_samples_of_an_older_policy(vector, dtype, matches):
    """Drawn from prox and weighed by policy / prox: still the gradient of KL(policy || ref)."""
    case = vector("kl_estimators_tabular")
    logits, ref = (torch.tensor(case["inputs"][k], dtype=dtype).log() for k in ("pi", "ref"))
    prox = torch.tensor([0.2, 0.6, 0.2], dtype=dtype).log()
    logits.requires_grad_(True)
    for estimator, is_right in (("k3_weighted", True), ("k2", False)):
        loss = (prox.exp() * kl.kl_loss(logits.log_softmax(-1), ref, estimator, prox)).sum()
        (gradient,) = torch.autograd.grad(loss, logits)
        right = torch.tensor(case["expected"]["grad_KL_pi_ref"], dtype=dtype)
        assert torch.allclose(gradient, right, atol=1e-5) is is_right


def test_far_drift_is_finite_and_its_value_is_not_cut_short():
    policy = torch.tensor([-30.0, -15.0, 0.0], requires_grad=True)
    ref = torch.tensor([0.0, 0.0, -30.0])
    estimators: tuple[kl.Estimator, ...] = ("k2", "k3", "k3_weighted")
    for estimator in estimators:
        loss = kl.kl_loss(policy, ref, estimator)
        (gradient,) = torch.autograd.grad(loss.sum(), policy)
        assert loss.isfinite().all() and gradient.isfinite().all()
        # Clamping the value at 10, as others do, would leave no gradient here.
        assert loss.tolist()[1] > 10 and abs(gradient.tolist()[1]) > 10


# --- where minimising each ends -----------------------------------------------------------------


@pytest.mark.parametrize("use", ["k2", "k3", "IS_k3", "in_reward"])
def test_minimising_lowers_the_divergence(use):
    """Report a18: equal rewards, coefficient 1: the policy comes nearer to the reference."""
    ref = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64).log()
    logits = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)
    per_token = (USES | {"in_reward": in_reward})[use]
    distances = []
    for _ in range(11):
        policy = logits.log_softmax(-1)
        distances.append(float((policy.exp() * (policy - ref)).sum()))
        logits = logits - 0.1 * expected_gradient(logits, ref, per_token, torch.ones(3))
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 0.8 * distances[0]


def bandit(case: dict) -> tuple[torch.Tensor, torch.Tensor, float]:
    reward = torch.tensor(case["inputs"]["rewards"], dtype=torch.float64)
    return reward, torch.full_like(reward, -math.log(len(reward))), case["inputs"]["beta"]


def test_the_optimum_is_the_tilted_reference(vector, matches):
    case = vector("bandit_kl_optimum")
    reward, ref, beta = bandit(case)
    tilted = ref + reward / beta
    policy = tilted.log_softmax(-1)
    distance = (policy.exp() * kl.k1(policy - ref)).sum()
    matches(policy.exp(), case["expected"]["pi_star"], case["tolerance"])
    matches(beta * tilted.logsumexp(-1), case["expected"]["J_star"], case["tolerance"])
    matches((policy.exp() * reward).sum(), case["expected"]["E_reward"], case["tolerance"])
    matches(distance, case["expected"]["KL"], case["tolerance"])
    value = (policy.exp() * reward).sum() - beta * distance
    matches(value, case["expected"]["J_star"], case["tolerance"])


def flow(gradient: Callable[[torch.Tensor], torch.Tensor], steps: int = 400) -> list[float]:
    """Where exact gradient descent on three logits ends."""
    logits = torch.zeros(3, dtype=torch.float64)
    for _ in range(steps):
        logits = logits - 8.0 * gradient(logits)
    return logits.softmax(-1).tolist()


@pytest.mark.parametrize(
    ("key", "use"),
    [
        ("k1_in_reward_or_k2_loss_or_IS_k3", "in_reward"),
        ("k1_in_reward_or_k2_loss_or_IS_k3", "k2"),
        ("k1_in_reward_or_k2_loss_or_IS_k3", "IS_k3"),
        ("k3_as_loss", "k3"),
        ("k1_as_loss", "k1"),
    ],
)
def test_each_use_of_the_kl_ends_at_its_own_fixed_point(key, use, vector):
    case = vector("bandit_kl_fixed_points")
    reward, ref, beta = bandit(case)
    per_token = (USES | {"in_reward": in_reward})[use]
    end = flow(
        lambda logits: expected_gradient(logits, ref, lambda p, q: beta * per_token(p, q), reward)
    )
    assert end == pytest.approx(case["expected"][key], abs=1e-3)


def test_a_group_mean_baseline_makes_the_kl_weigh_more(vector):
    """All groups of 8 by their counts: the expected gradient of the reward is 7/8 of the true."""
    case = vector("bandit_kl_fixed_points")
    reward, ref, beta = bandit(case)
    size = 8
    counts = torch.tensor([c for c in product(range(size + 1), repeat=3) if sum(c) == size])
    ways = (math.lgamma(size + 1) - torch.lgamma(counts.double() + 1).sum(-1)).exp()
    # Sum of the advantages of the members that drew each action, over the group's size.
    credit = torch.stack(
        [c * _advantage_of_actions(c, reward) / size for c in counts]
    )  # [groups, actions]

    def gradient(logits: torch.Tensor) -> torch.Tensor:
        pi = logits.softmax(-1)
        chance = ways * (pi**counts).prod(-1)
        per_action = (chance[:, None] * credit).sum(0)
        toward_reward = per_action - pi * per_action.sum()
        exact = pi * (reward - (pi * reward).sum())
        assert torch.allclose(toward_reward, 7 / 8 * exact)
        return beta * expected_gradient(logits, ref, as_loss("k2")) - toward_reward

    end = flow(gradient, steps=120)
    assert end == pytest.approx(case["expected"]["group_mean_baseline_G8_k2_loss"], abs=1e-3)


def _advantage_of_actions(counts: torch.Tensor, reward: torch.Tensor) -> torch.Tensor:
    """A of each action in the group with these counts; 0 for one that nobody drew."""
    actions = torch.repeat_interleave(counts)
    advantages = torch.zeros(3, dtype=torch.float64)
    advantages[actions] = centred(reward[actions])
    return advantages


def test_the_mismatch_is_k3_with_the_sampler_as_the_policy(dtype):
    gaps = torch.tensor([-1.0, 0.0, 1e-4, 2.0], dtype=dtype)
    assert torch.equal(mismatch_k3(gaps), kl.k3(-gaps))


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

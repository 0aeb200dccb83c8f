"""What a critic is trained by: hand values, gradients and the rule that all losses share."""

from __future__ import annotations

import pytest
import torch

from posttrain.algo.self_play import azr_propose, r_zero_uncertainty
from posttrain.algo.value import explained_variance, length_adaptive_lambda, value_loss


def of_vector(case, dtype):
    given = case["inputs"]
    names = ("v_new", "v_old", "returns")
    return [torch.tensor(given[name], dtype=dtype) for name in names]


def test_the_clipped_value_loss_gives_its_hand_value_and_gradient(vector, dtype, matches):
    case = vector("value_loss_clip")
    expected = case["expected"]
    values_N, prox_values_N, returns_N = of_vector(case, dtype)
    values_N.requires_grad_()
    clip = case["inputs"]["eps_v"]
    loss = value_loss(values_N, prox_values_N, returns_N, clip=clip).mean()
    loss.backward()
    matches(loss, expected["loss"], case["tolerance"])
    matches(values_N.grad, expected["grad"], case["tolerance"])
    unclipped_N = 2 * value_loss(values_N, prox_values_N, returns_N, clip=None)
    matches(unclipped_N, expected["unclipped"], case["tolerance"])
    near_N = values_N.clamp(prox_values_N - clip, prox_values_N + clip)
    clipped_N = 2 * value_loss(near_N, prox_values_N, returns_N, clip=None)
    matches(clipped_N, expected["clipped"], case["tolerance"])


@pytest.mark.parametrize("clip", [0.2, None])
def test_the_value_loss_has_the_gradient_of_finite_differences(clip):
    torch.manual_seed(0)
    values_N, prox_values_N, returns_N = torch.randn(3, 16, dtype=torch.float64)
    values_N.requires_grad_()

    def loss(values_N):
        return value_loss(values_N, prox_values_N, returns_N, clip=clip)

    assert torch.autograd.gradcheck(loss, (values_N,))


def test_targets_and_the_critic_at_the_start_of_the_step_get_no_gradient():
    values_N, prox_values_N, returns_N = torch.randn(3, 8, dtype=torch.float64).unbind()
    for column in (values_N, prox_values_N, returns_N):
        column.requires_grad_()
    value_loss(values_N, prox_values_N, returns_N, clip=0.1).sum().backward()
    assert prox_values_N.grad is None and returns_N.grad is None
    assert values_N.grad is not None


def test_the_first_update_of_a_step_clips_nothing():
    values_N, returns_N = torch.randn(2, 8, dtype=torch.float64)
    clipped = value_loss(values_N, values_N, returns_N, clip=1e-3)
    assert torch.equal(clipped, value_loss(values_N, values_N, returns_N, clip=None))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_gradient_of_the_value_loss_does_not_depend_on_the_micro_batch_size(size):
    """Report a27: the value loss follows the rule of all losses, one denominator for the step."""
    torch.manual_seed(0)
    features, prox_values_N, returns_N = torch.randn(3, 12, dtype=torch.float64)
    sequences = [range(0, 5), range(5, 6), range(6, 10), range(10, 12)]

    def gradient(size):
        weight = torch.ones((), dtype=torch.float64, requires_grad=True)
        for start in range(0, 4, size):
            rows = [n for s in sequences[start : start + size] for n in s]
            values_N = weight * features[rows]
            loss_N = value_loss(values_N, prox_values_N[rows], returns_N[rows], clip=0.5)
            (loss_N.sum() / 12).backward()
        return float(weight.grad)

    assert gradient(size) == pytest.approx(gradient(4), abs=1e-12)


def test_explained_variance_gives_its_hand_value(vector, dtype, matches):
    case = vector("explained_variance")
    returns_N = torch.tensor(case["inputs"]["returns"], dtype=dtype)
    values_N = torch.tensor(case["inputs"]["values"], dtype=dtype)
    matches(explained_variance(values_N, returns_N), case["expected"]["ev"], case["tolerance"])
    constant_N = returns_N.mean().expand(6)
    expected = case["expected"]["ev_constant_mean"]
    matches(explained_variance(constant_N, returns_N), expected, case["tolerance"])


def test_a_perfect_critic_explains_all_a_bad_one_less_than_nothing(dtype):
    returns_N = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=dtype)
    assert float(explained_variance(returns_N, returns_N)) == 1.0
    assert float(explained_variance(-returns_N, returns_N)) < 0
    # A constant offset is no variance: a bias shows in the loss, not here.
    assert float(explained_variance(returns_N + 5.0, returns_N)) == pytest.approx(1.0, abs=1e-6)


def test_returns_without_variance_leave_nothing_to_explain(dtype):
    for size in (0, 1, 5):
        returns_N = torch.full((size,), 0.1, dtype=dtype)
        assert float(explained_variance(torch.arange(size).to(dtype), returns_N)) == 0.0


def test_lambda_grows_with_length_and_stays_within_0_and_1(vector, dtype, matches):
    case = vector("vapo_length_adaptive_lambda")
    lengths_S = torch.tensor(case["inputs"]["lengths"], dtype=dtype)
    result = length_adaptive_lambda(lengths_S, case["inputs"]["alpha"])
    matches(result, case["expected"], case["tolerance"])
    short_S = torch.tensor([0.0, 1.0, 20.0], dtype=dtype)
    assert length_adaptive_lambda(short_S, 0.05).tolist() == [0.0, 0.0, 0.0]


def test_a_proposer_is_paid_for_tasks_that_can_be_solved_but_are_not_always(vector, dtype, matches):
    case = vector("self_play_rewards")
    pass_rates_T = torch.tensor(case["inputs"]["p_solve"], dtype=dtype)
    for rule in (azr_propose, r_zero_uncertainty):
        matches(rule(pass_rates_T), case["expected"][rule.__name__], case["tolerance"])

"""Flow matching as a decision process."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.algo.flow import (
    FlowStep,
    dance_grpo_step,
    flow_grpo_step,
    flow_score,
    log_ratio_parts,
    step_kl,
    step_logprob,
)


def rows(values: list[float], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([values], dtype=dtype)


def flow_case(case: dict, dtype: torch.dtype, velocity: str = "v") -> FlowStep:
    inputs = case["inputs"]
    return flow_grpo_step(
        rows(inputs["x"], dtype),
        rows(inputs[velocity], dtype),
        inputs["sigma"],
        inputs["sigma_next"],
        noise_level=inputs["a"],
    )


# --- vectors ------------------------------------------------------------------------------------


def test_a_flow_grpo_step_and_its_logprob(vector, matches, dtype):
    case = vector("flow_grpo_step")
    expected, dt = case["expected"], case["inputs"]["sigma_next"] - case["inputs"]["sigma"]
    step = flow_case(case, dtype)
    x_next_BD = step.at(rows(case["inputs"]["noise"], dtype))
    matches(step.std / math.sqrt(-dt), expected["sigma_t"])
    matches(step.std, expected["step_std"])
    matches(step.mean_BD, [expected["mean"]])
    matches(x_next_BD, [expected["x_next"]])
    matches(step.logprobs(x_next_BD), [expected["logp_elem"]])
    matches(step_logprob(step, x_next_BD), [expected["logp_mean"]])
    matches(step_logprob(step, x_next_BD, reduction="sum"), [expected["logp_sum"]])


def test_a_ratio_depends_on_the_reduction(vector, matches, dtype):
    case = vector("flow_grpo_step")
    step, new = flow_case(case, dtype), flow_case(case, dtype, "v_new")
    x_next_BD = step.at(rows(case["inputs"]["noise"], dtype))
    for reduction in ("mean", "sum"):
        log_ratio_B = step_logprob(new, x_next_BD, reduction=reduction) - step_logprob(
            step, x_next_BD, reduction=reduction
        )
        matches(log_ratio_B.exp(), [case["expected"][f"ratio_{reduction}_reduction"]])


def test_the_kl_of_a_step_is_the_true_one(vector, matches, dtype):
    """The published code averages over dimensions and leaves out dt: 20 times less."""
    case = vector("flow_grpo_step")
    step, ref = flow_case(case, dtype), flow_case(case, dtype, "v_ref")
    value_B = step_kl(step, ref.mean_BD)
    matches(value_B, [case["expected"]["kl_true_sum"]])
    assert value_B.item() > 10 * case["expected"]["kl_code_mean_no_dt"]
    dt = case["inputs"]["sigma_next"] - case["inputs"]["sigma"]
    converted = value_B * -dt / step.mean_BD.shape[1]
    matches(converted, [case["expected"]["kl_code_mean_no_dt"]])


def test_a_dance_grpo_step(vector, matches, dtype):
    case = vector("dance_grpo_step")
    inputs, expected = case["inputs"], case["expected"]
    x_BD, velocity_BD = rows(inputs["x"], dtype), rows(inputs["v"], dtype)
    sigmas = inputs["sigma"], inputs["sigma_next"]
    step = dance_grpo_step(x_BD, velocity_BD, *sigmas, eta=inputs["eta"])
    matches(flow_score(x_BD, velocity_BD, inputs["sigma"]), [expected["score"]])
    matches(step.mean_BD, [expected["mean"]])
    matches(step.std, expected["std"])


def test_a_log_ratio_is_noise_and_a_bias_to_the_left(vector, matches, dtype):
    case, flow = vector("flow_log_ratio_decomposition"), vector("flow_grpo_step")
    step, new = flow_case(flow, dtype), flow_case(flow, dtype, "v_new")
    noise_BD = rows(flow["inputs"]["noise"], dtype)
    noise_part_BD, bias_BD = log_ratio_parts(new.mean_BD, step.mean_BD, noise_BD, step.std)
    x_next_BD = step.at(noise_BD)
    direct_BD = new.logprobs(x_next_BD) - step.logprobs(x_next_BD)
    matches(noise_part_BD + bias_BD, [case["expected"]["formula_elem"]])
    matches(direct_BD, [case["expected"]["log_ratio_elem"]])
    matches(bias_BD.sum(), case["expected"]["mean_bias_sum"])


def test_the_tilt_of_a_gaussian(vector):
    """N(0, 1) tilted by exp(-(x - m)^2 / (2 beta)), integrated on a grid."""
    case = vector("gaussian_tilt_optimum")
    m, beta = case["inputs"]["m"], case["inputs"]["beta"]
    x = torch.linspace(-12, 12, 20_001, dtype=torch.float64)
    density = (-x.square() / 2 - (x - m).square() / (2 * beta)).softmax(0)
    mean = (density * x).sum().item()
    var = (density * (x - mean).square()).sum().item()
    assert mean == pytest.approx(case["expected"]["mean"]) == m / (1 + beta)
    assert var == pytest.approx(case["expected"]["var"]) == beta / (1 + beta)


# --- rules --------------------------------------------------------------------------------------


def test_the_first_step_takes_the_second_grid_point_for_its_noise(dtype):
    """At sigma = 1 the noise sqrt(sigma / (1 - sigma)) is infinite; 1 - sigma_1 replaces it."""
    step = flow_grpo_step(torch.ones(1, 2, dtype=dtype), torch.ones(1, 2, dtype=dtype), 1.0, 0.9)
    assert step.std.item() == pytest.approx(0.7 * math.sqrt(1 / 0.1) * math.sqrt(0.1), rel=1e-5)
    assert bool(step.mean_BD.isfinite().all())


def test_without_noise_both_steps_are_the_ode(dtype):
    x_BD, velocity_BD = rows([0.5, -1.0], dtype), rows([0.2, 0.4], dtype)
    euler_BD = x_BD - 0.1 * velocity_BD
    for step in (
        flow_grpo_step(x_BD, velocity_BD, 0.6, 0.5, noise_level=0.0),
        dance_grpo_step(x_BD, velocity_BD, 0.6, 0.5, eta=0.0),
    ):
        assert torch.allclose(step.mean_BD, euler_BD) and step.std.item() == 0.0


def test_both_drifts_are_the_ode_plus_half_the_squared_noise_times_the_score():
    """Two ways to write one equation: they agree where their noise does."""
    generator = torch.Generator().manual_seed(0)
    x_BD, velocity_BD = torch.randn(2, 3, 4, dtype=torch.float64, generator=generator)
    sigma, sigma_next = 0.6, 0.5
    eta = 0.7 * math.sqrt(sigma / (1 - sigma))
    flow = flow_grpo_step(x_BD, velocity_BD, sigma, sigma_next)
    dance = dance_grpo_step(x_BD, velocity_BD, sigma, sigma_next, eta=eta)
    assert torch.allclose(flow.mean_BD, dance.mean_BD) and torch.allclose(flow.std, dance.std)


def test_the_score_is_the_gradient_of_the_log_density():
    """x_0 ~ N(0, 1): x_sigma ~ N(0, sigma^2 + (1 - sigma)^2) and v = E[noise - x_0 | x]."""
    sigma, x_BD = 0.3, torch.linspace(-2, 2, 5, dtype=torch.float64)[:, None]
    var = sigma**2 + (1 - sigma) ** 2
    velocity_BD = x_BD * (2 * sigma - 1) / var
    assert torch.allclose(flow_score(x_BD, velocity_BD, sigma), -x_BD / var)


def test_each_sample_may_be_at_its_own_noise_level(dtype):
    x_BD = torch.tensor([[0.5, -1.0], [0.1, 0.3]], dtype=dtype)
    velocity_BD = torch.tensor([[0.2, 0.4], [-0.3, 0.1]], dtype=dtype)
    sigma, sigma_next = torch.tensor([[1.0], [0.6]]), torch.tensor([[0.8], [0.5]])
    for function in (flow_grpo_step, dance_grpo_step):
        together = function(x_BD, velocity_BD, sigma, sigma_next)
        for i in range(2):
            row = slice(i, i + 1)
            alone = function(x_BD[row], velocity_BD[row], sigma[i].item(), sigma_next[i].item())
            assert torch.allclose(together.mean_BD[row], alone.mean_BD)
            assert torch.allclose(together.std[row], alone.std)


@pytest.mark.parametrize("levels", [(0.5, 0.6), (0.5, 0.5), (1.1, 0.5), (0.2, -0.1)])
def test_a_grid_in_the_wrong_order_is_refused(levels):
    for function in (flow_grpo_step, dance_grpo_step):
        with pytest.raises(ValueError, match="0 <= sigma_next < sigma <= 1"):
            function(torch.zeros(1, 2), torch.zeros(1, 2), *levels)


def test_the_last_step_reaches_sigma_0(dtype):
    for function in (flow_grpo_step, dance_grpo_step):
        step = function(torch.ones(1, 2, dtype=dtype), torch.ones(1, 2, dtype=dtype), 0.1, 0.0)
        assert bool(step.logprobs(step.mean_BD).isfinite().all())


def test_gradients_are_right():
    generator = torch.Generator().manual_seed(0)
    x_BD, velocity_BD, x_next_BD = torch.randn(3, 2, 3, dtype=torch.float64, generator=generator)
    leaf = velocity_BD.clone().requires_grad_()
    for function in (flow_grpo_step, dance_grpo_step):

        def logprob(v, function=function):
            return step_logprob(function(x_BD, v, 0.6, 0.5), x_next_BD)

        def kl(v, function=function):
            return step_kl(function(x_BD, v, 0.6, 0.5), x_BD)

        assert torch.autograd.gradcheck(logprob, (leaf,))
        assert torch.autograd.gradcheck(kl, (leaf,))


def test_the_kl_is_that_of_two_gaussians():
    policy = FlowStep(torch.tensor([[0.3, -0.2]]).double(), torch.tensor(0.4).double())
    ref_mean_BD = torch.tensor([[0.1, 0.1]]).double()
    normal = torch.distributions.Normal
    wanted = torch.distributions.kl_divergence(
        normal(policy.mean_BD, 0.4), normal(ref_mean_BD, 0.4)
    ).sum(1)
    assert torch.allclose(step_kl(policy, ref_mean_BD), wanted)

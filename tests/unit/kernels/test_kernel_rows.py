"""Norm, gate and rotary kernels against the same formulas in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from posttrain.kernels.rows import rms_norm, rotate, swiglu

Function = Callable[..., torch.Tensor]
LENGTHS = (576, 64, 40, 7)
"""Whole vectors of 16, and rows that end inside one."""


def plain_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def plain_rotation(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(torch.bfloat16)


def gradients(function: Function, inputs: list[torch.Tensor], slope: torch.Tensor) -> Any:
    leaves = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*leaves), leaves, slope)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("n", LENGTHS)
def test_a_norm_rounds_as_transformers_does(n: int) -> None:
    x, weight = 3 * random(9, n), 1 + random(n, seed=1) / 8
    assert torch.equal(rms_norm(x, weight, 1e-5), plain_norm(x, weight))


@pytest.mark.parametrize("n", LENGTHS)
def test_a_norm_has_the_gradients_of_its_formula(n: int) -> None:
    inputs, slope = [3 * random(9, n), 1 + random(n, seed=1) / 8], random(9, n, seed=2)
    ours = gradients(lambda x, w: rms_norm(x, w, 1e-5), inputs, slope)
    exact = gradients(plain_norm, [x.double() for x in inputs], slope.double())
    assert all(relative(a, b) < 6e-3 for a, b in zip(ours, exact, strict=True))


@pytest.mark.parametrize("n", LENGTHS)
def test_a_gate_and_its_gradients_are_those_of_its_formula(n: int) -> None:
    inputs, slope = [4 * random(9, n), random(9, n, seed=1)], random(9, n, seed=2)
    assert torch.equal(swiglu(*inputs), F.silu(inputs[0]) * inputs[1])
    ours = gradients(swiglu, inputs, slope)
    exact = gradients(
        lambda gate, up: F.silu(gate) * up, [x.double() for x in inputs], slope.double()
    )
    assert all(relative(a, b) < 6e-3 for a, b in zip(ours, exact, strict=True))


@pytest.mark.parametrize("d", [64, 40, 6])
def test_a_rotation_has_the_bits_of_transformers_and_its_gradient_is_the_rotation_back(
    d: int,
) -> None:
    angles = random(9, d // 2).float().repeat(1, 2)
    cos, sin = angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)
    x, slope = random(9, 3, d), random(9, 3, d, seed=1)
    assert torch.equal(rotate(x, cos, sin), plain_rotation(x, cos, sin))
    (ours,) = gradients(lambda t: rotate(t, cos, sin), [x], slope)
    (exact,) = gradients(
        lambda t: plain_rotation(t, cos.double(), sin.double()), [x.double()], slope.double()
    )
    assert relative(ours, exact) < 6e-3


@pytest.mark.parametrize("function", [lambda x: rms_norm(x, x[0], 1e-6), lambda x: swiglu(x, x)])
def test_a_row_has_the_same_bits_alone_and_among_many_and_with_any_number_of_threads(
    function: Function,
) -> None:
    x = random(300, 100)
    many = function(x)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(function(x), many)
            assert torch.equal(function(x[:1]), many[:1])
    finally:
        torch.set_num_threads(threads)


def test_what_is_not_a_number_stays_visible() -> None:
    x = random(3, 40)
    x[1, 5] = float("nan")
    normed = rms_norm(x, torch.ones(40, dtype=torch.bfloat16), 1e-6)
    assert normed[1].isnan().all() and not normed[[0, 2]].isnan().any()
    assert swiglu(x, x).isnan().nonzero().tolist() == [[1, 5]]


def test_large_inputs_do_not_overflow() -> None:
    x = torch.tensor([[-3e38, -100.0, 0.0, 100.0, 3e38]], dtype=torch.bfloat16)
    assert torch.equal(swiglu(x, torch.ones_like(x)), F.silu(x))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: rms_norm(x, x[0, :5], 1e-6),
        lambda x: rms_norm(x.float(), x[0].float(), 1e-6),
        lambda x: swiglu(x, x[:, :20]),
        lambda x: rotate(x.view(3, 1, 40), x[:, :20], x[:, :20]),
    ],
)
def test_what_does_not_fit_is_refused_before_c_reads_it(call: Function) -> None:
    with pytest.raises(ValueError, match="kernel argument"):
        call(random(3, 40))

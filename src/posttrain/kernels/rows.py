"""RMSNorm, SwiGLU and rotary positions of bf16 rows, with gradients.

Rounding is that of transformers' own modules: after the norm and after the weight, after silu and
after the product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from posttrain.kernels.library import functions, pointer

_LANES = 16


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        y, rstd = _normed(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        n, threads = x.shape[-1], torch.get_num_threads()
        rows = len(rstd)
        dx = torch.empty_like(x)
        parts = torch.zeros(threads, n + _LANES)
        functions().rms_norm_backward(
            pointer(grads[0].contiguous(), x.shape), pointer(x), pointer(weight, [n]),
            pointer(rstd, [rows], torch.float32), pointer(dx),
            pointer(parts, dtype=torch.float32), rows, n, threads,
        )  # fmt: skip
        return dx, parts[:, :n].sum(0).to(weight.dtype), None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * x / rms(x) over the last dimension, any leading shape, bf16."""
    x = x.contiguous()
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _RmsNorm.apply(x, weight, eps)  # type: ignore[no-any-return]
    return _normed(x, weight, eps)[0]


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    n = x.shape[-1]
    rows = x.numel() // n
    y, rstd = torch.empty_like(x), torch.empty(rows)
    functions().rms_norm(
        pointer(x), pointer(weight, [n]), eps, pointer(y), pointer(rstd, dtype=torch.float32),
        rows, n, torch.get_num_threads(),
    )  # fmt: skip
    return y, rstd


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return _gated(gate, up)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        n = gate.shape[-1]
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        functions().swiglu_backward(
            pointer(grads[0].contiguous(), gate.shape), pointer(gate), pointer(up),
            pointer(dgate), pointer(dup), gate.numel() // n, n, torch.get_num_threads(),
        )  # fmt: skip
        return dgate, dup


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, bf16 of one shape."""
    gate, up = gate.contiguous(), up.contiguous()
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return _Swiglu.apply(gate, up)  # type: ignore[no-any-return]
    return _gated(gate, up)


def _gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    n = gate.shape[-1]
    out = torch.empty_like(gate)
    functions().swiglu(
        pointer(gate), pointer(up, gate.shape), pointer(out), gate.numel() // n, n,
        torch.get_num_threads(),
    )  # fmt: skip
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0].contiguous(), cos, sin, -1.0), None, None


def rotate(x_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    """x * cos + rotate_half(x) * sin of every head [T, H, D], bf16; halves of cos and sin alike."""
    x_THD = x_THD.contiguous()
    if torch.is_grad_enabled() and x_THD.requires_grad:
        return _Rotate.apply(x_THD, cos_TD, sin_TD)  # type: ignore[no-any-return]
    return _rotated(x_THD, cos_TD, sin_TD, 1.0)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> torch.Tensor:
    rows, _, d = x.shape
    out = torch.empty_like(x)
    functions().rotate(
        pointer(x), pointer(cos, [rows, d]), pointer(sin, [rows, d]), pointer(out), *x.shape, sign,
        torch.get_num_threads(),
    )  # fmt: skip
    return out

"""Forward passes of a transformers model's own modules through kernels and packed weights.

The model's code stays as it is: single instances get another `forward`, and only where a probe
gives the same bits as the module itself. Names decide nothing but whether a module is tried.
Sampler and learner run the same modules, so both change together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from posttrain.kernels.library import MAX_HEAD_SIZE, available
from posttrain.kernels.rows import rms_norm, rotate, swiglu

_PROBE_ROWS = (4, 7, 64, 300)
"""A packed product must not depend on the rows: tried with few, an odd number and many."""


def install(model: torch.nn.Module, *, packed: bool) -> dict[str, int]:
    """Give modules faster forwards; returns how many of each kind got one.

    With `packed`, linear layers keep a second copy of their weights in the order that oneDNN
    multiplies in, for passes without gradient: products of a few dozen rows are two to four times
    as fast. Nothing happens where the kernels are not available.
    """
    weights = next(model.parameters())
    if not available(weights):
        return {}
    counts = {"norms": 0, "gates": 0, "attention": 0, "packed": 0}
    with torch.no_grad():
        if packed:
            counts["packed"] = _pack(model)
        for module in model.modules():
            counts["norms"] += _replaced(module, _norm(module), _probe_norm)
            counts["gates"] += _replaced(module, _gate(module), _probe_gate)
            counts["attention"] += _replaced(module, _attention(module), _probe_attention)
    return counts


Forward = Callable[..., Any]
Probe = Callable[[Any, Forward], torch.Tensor]


def _replaced(module: Any, forward: Forward | None, probe: Probe) -> bool:
    """Whether `forward` gives what the module gives, bit for bit; then it takes its place."""
    if forward is None:
        return False
    try:
        same = torch.equal(probe(module, module.forward), probe(module, forward))
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, AssertionError):
        return False  # it is not what its attributes look like
    if same:
        module.forward = forward
    return same


def _random(*shape: int) -> torch.Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    return drawn.to(torch.bfloat16)


def _has_modules(module: Any, names: Sequence[str]) -> bool:
    return all(isinstance(getattr(module, name, None), torch.nn.Module) for name in names)


# --- norms ----------------------------------------------------------------------------------------


def _norm(module: Any) -> Forward | None:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or weight is None or eps is None:
        return None

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, module.weight, eps)

    return forward


def _probe_norm(module: Any, forward: Forward) -> torch.Tensor:
    return forward(_random(5, len(module.weight)))


# --- gated layers ---------------------------------------------------------------------------------


def _gate(module: Any) -> Forward | None:
    if not _has_modules(module, ("gate_proj", "up_proj", "down_proj")):
        return None

    def forward(x: torch.Tensor) -> torch.Tensor:
        return module.down_proj(swiglu(module.gate_proj(x), module.up_proj(x)))

    return forward


def _probe_gate(module: Any, forward: Forward) -> torch.Tensor:
    return forward(_random(8, _inputs(module.gate_proj)))


def _inputs(linear: Any) -> int:
    return int(getattr(linear, "in_features", 0))


# --- attention ------------------------------------------------------------------------------------


class _Recorder:
    """A layout that keeps the arithmetic it is asked for, and answers with what it was given."""

    def __init__(self) -> None:
        self.core: Any = None

    def attend(
        self,
        layer: int,
        query_TKRD: torch.Tensor,
        key_TKD: torch.Tensor,
        value_TKD: torch.Tensor,
        core: Any,
    ) -> torch.Tensor:
        self.core = core
        return query_TKRD * key_TKD[:, :, None] + value_TKD[:, :, None]


def _attention(module: Any) -> Forward | None:
    """Projections, rotary positions and attention on rows [T, heads, head size] as they lie."""
    d = getattr(module, "head_dim", None)
    if not _has_modules(module, ("q_proj", "k_proj", "v_proj", "o_proj")):
        return None
    if not isinstance(d, int) or d > MAX_HEAD_SIZE or d % 2:
        return None
    recorder = _Recorder()
    try:
        module(*_attention_probe(module), layout=recorder)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
        return None
    core, norms = recorder.core, _has_modules(module, ("q_norm", "k_norm"))

    def forward(
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        *_unused: Any,
        layout: Any,
        **_also_unused: Any,
    ) -> tuple[torch.Tensor, None]:
        rows = hidden_states[0]
        count = len(rows)
        cos, sin = (part[0].contiguous() for part in position_embeddings)
        query, key, value = (
            project(rows).view(count, -1, d)
            for project in (module.q_proj, module.k_proj, module.v_proj)
        )
        if norms:
            query, key = module.q_norm(query), module.k_norm(key)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        kv_heads = key.shape[1]
        grouped = query.view(count, kv_heads, -1, d)
        out = layout.attend(module.layer_idx, grouped, key, value, core)
        return module.o_proj(out.reshape(count, -1))[None], None

    return forward


def _attention_probe(module: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Hidden states and rotary positions of a few tokens."""
    angles = _random(8, module.head_dim // 2).float().repeat(1, 2)[None]
    rotary = angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)
    return _random(1, 8, _inputs(module.q_proj)), rotary


def _probe_attention(module: Any, forward: Forward) -> torch.Tensor:
    return forward(*_attention_probe(module), layout=_Recorder())[0]


# --- packed weights -------------------------------------------------------------------------------


class _Packed:
    """A linear layer's forward. Without gradient it multiplies with a copy of the weight in
    oneDNN's own order, made anew when the weight has changed."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        self._linear = linear
        self._copy: torch.Tensor | None = None
        self._version = -1

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        linear, x = self._linear, input
        if torch.is_grad_enabled():
            return F.linear(x, linear.weight, linear.bias)
        if self._copy is None or self._version != linear.weight._version:
            self._copy = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
            self._version = linear.weight._version
        return torch.ops.mkldnn._linear_pointwise(x, self._copy, linear.bias, "none", [], "")


def _pack(model: torch.nn.Module) -> int:
    """Every plain linear layer of a shape for which both orders give the same bits."""
    same: dict[tuple[int, int, bool], bool] = {}
    count = 0
    for module in model.modules():
        if type(module) is not torch.nn.Linear or module.weight.dtype != torch.bfloat16:
            continue
        packed = _Packed(module)
        shape = (module.in_features, module.out_features, module.bias is not None)
        if shape not in same:
            same[shape] = _gives_the_same(module, packed)
        if same[shape]:
            module.forward = packed
            count += 1
    return count


def _gives_the_same(linear: torch.nn.Linear, packed: _Packed) -> bool:
    try:
        return all(
            torch.equal(linear.forward(x), packed(x))
            for x in (_random(rows, linear.in_features) for rows in _PROBE_ROWS)
        )
    except (RuntimeError, AttributeError):
        return False  # this torch has no such operation

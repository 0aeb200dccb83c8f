"""Forward passes of a transformers model's own modules through kernels and packed weights.

The model's code stays as it is: single instances get another `forward`, and only where a probe
gives the same bits as the module itself. Names decide nothing but whether a module is tried.
Sampler and learner run the same modules, so both change together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from posttrain.kernels.library import MAX_HEAD_SIZE, available
from posttrain.kernels.rows import rms_norm, rotate, swiglu

_PROBE_ROWS = (4, 7, 64, 300)
"""A packed product must have the bits of a plain one: tried with few, an odd number and many."""


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
        theirs, ours = probe(module, module.forward), probe(module, forward)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, AssertionError):
        return False  # it is not what its attributes look like
    same = bool(theirs.any()) and torch.equal(theirs, ours)  # zeros would prove nothing
    if same:
        module.forward = forward
    return same


def _random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    drawn = scale * torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    return drawn.to(torch.bfloat16)


def _has_modules(module: Any, names: Sequence[str]) -> bool:
    return all(isinstance(getattr(module, name, None), torch.nn.Module) for name in names)


# Forwards are partial functions of their module, so that a copy of the model gets its own.

# --- norms ----------------------------------------------------------------------------------------


def _norm(module: Any) -> Forward | None:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or weight is None or eps is None:
        return None
    return partial(_norm_forward, module, eps)


def _norm_forward(module: Any, eps: float, hidden_states: torch.Tensor) -> torch.Tensor:
    return rms_norm(hidden_states, module.weight, eps)


def _probe_norm(module: Any, forward: Forward) -> torch.Tensor:
    """With weights that are not all one: where they are multiplied shows."""
    kept = module.weight.clone()
    try:
        module.weight.copy_(_random(len(kept)))
        return forward(_random(5, len(kept), scale=8.0))
    finally:
        module.weight.copy_(kept)


# --- gated layers ---------------------------------------------------------------------------------


def _gate(module: Any) -> Forward | None:
    if not _has_modules(module, ("gate_proj", "up_proj", "down_proj")):
        return None
    return partial(_gate_forward, module)


def _gate_forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    return module.down_proj(swiglu(module.gate_proj(x), module.up_proj(x)))


def _probe_gate(module: Any, forward: Forward) -> torch.Tensor:
    """Ordinary inputs, and large ones: limits on what the layer computes would show."""
    n = _inputs(module.gate_proj)
    return torch.cat([forward(_random(8, n)), forward(_random(8, n, scale=30.0))])


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
    return partial(_attention_forward, module, recorder.core)


def _attention_forward(
    module: Any,
    core: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    *unused: Any,
    layout: Any,
    **also_unused: Any,
) -> tuple[torch.Tensor, None]:
    rows, d = hidden_states[0], module.head_dim
    count = len(rows)
    cos, sin = (part[0].contiguous() for part in position_embeddings)
    if cos.shape[-1] != d:  # it rotates a part of each head
        own = type(module).forward
        return own(
            module, hidden_states, position_embeddings, *unused, layout=layout, **also_unused
        )
    query, key, value = (
        project(rows).view(count, -1, d)
        for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    if _has_modules(module, ("q_norm", "k_norm")):
        query, key = module.q_norm(query), module.k_norm(key)
    query, key = rotate(query, cos, sin), rotate(key, cos, sin)
    grouped = query.view(count, key.shape[1], -1, d)
    out = layout.attend(module.layer_idx, grouped, key, value, core)
    return module.o_proj(out.reshape(count, -1))[None], None


def _attention_probe(module: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Hidden states and rotary positions of a few tokens, every other one large."""
    angles = _random(8, module.head_dim // 2).float().repeat(1, 2)[None]
    rotary = angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)
    hidden = _random(1, 8, _inputs(module.q_proj))
    hidden[:, ::2] *= 30
    return hidden, rotary


def _probe_attention(module: Any, forward: Forward) -> torch.Tensor:
    return forward(*_attention_probe(module), layout=_Recorder())[0]


# --- packed weights -------------------------------------------------------------------------------


class _Packed:
    """A linear layer's forward. Without gradient it multiplies with a copy of the weight in
    oneDNN's own order, made anew when torch counts a change of the weight (`.data` hides one)."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        self._linear = linear
        self._copy: torch.Tensor | None = None
        self._of: tuple[int, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the model makes its own."""
        return {"_linear": self._linear, "_copy": None, "_of": None}

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        linear, x = self._linear, input
        if torch.is_grad_enabled():
            return F.linear(x, linear.weight, linear.bias)
        now = linear.weight.data_ptr(), linear.weight._version
        if self._copy is None or self._of != now:
            self._copy = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
            self._of = now
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

"""Modules get another forward only where it has their own bits; packed copies follow weights."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from posttrain.kernels.library import library
from posttrain.training import attention, fast_modules
from posttrain.training.policy import load_policy

pytestmark = pytest.mark.skipif(
    library().functions is None, reason=f"no compiled kernels: {library().problem}"
)


def small_llama(**changes: Any) -> Any:
    attention.register()
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 300,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(**(sizes | changes))).to(torch.bfloat16).eval()
    model.set_attn_implementation(attention.EXACT)
    return model


def logits(model: Any, rows: int = 40) -> torch.Tensor:
    ids = torch.arange(rows) * 7 % 300
    layout = attention.TreeLayout([torch.arange(rows).numpy()], [0], rows)
    with torch.no_grad():
        return model(
            input_ids=ids[None],
            position_ids=torch.arange(rows)[None],
            use_cache=False,
            layout=layout,
        ).logits[0]


def test_every_module_of_a_llama_is_replaced_and_the_logits_keep_their_bits() -> None:
    model = small_llama()
    plain = logits(model)
    assert fast_modules.install(model, packed=True) == {
        "norms": 5,
        "gates": 2,
        "attention": 2,
        "packed": 15,
    }
    assert torch.equal(logits(model), plain)


def test_gradients_are_those_of_the_models_own_modules() -> None:
    """Relative to the largest entry: both are bf16, rounded at other places."""
    plain, fast = small_llama(), small_llama()
    fast_modules.install(fast, packed=True)
    ids = torch.arange(40) * 7 % 300
    grads = []
    for model in (plain, fast):
        layout = attention.TreeLayout([torch.arange(40).numpy()], [0], 40)
        out = model(
            input_ids=ids[None],
            position_ids=torch.arange(40)[None],
            use_cache=False,
            layout=layout,
        ).logits[0]
        out.float().log_softmax(-1)[torch.arange(40), ids.roll(-1)].sum().backward()
        grads.append({n: p.grad.float() for n, p in model.named_parameters()})
    for name, expected in grads[0].items():
        error = (grads[1][name] - expected).norm() / expected.norm()
        assert error < 0.02, name


class HalfNorm(LlamaRMSNorm):
    """It has the name and the attributes of a norm, and computes something else."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) / 2


def test_what_only_looks_like_a_norm_keeps_its_forward() -> None:
    model = small_llama()
    model.model.norm.__class__ = type("HalfRMSNorm", (HalfNorm,), {})
    plain = logits(model)
    assert fast_modules.install(model, packed=False)["norms"] == 4
    assert torch.equal(logits(model), plain)


def test_another_activation_keeps_its_forward() -> None:
    model = small_llama(hidden_act="gelu")
    plain = logits(model)
    assert fast_modules.install(model, packed=False)["gates"] == 0
    assert torch.equal(logits(model), plain)


def test_a_packed_copy_follows_every_change_of_its_weight() -> None:
    model = small_llama()
    fast_modules.install(model, packed=True)
    logits(model)  # the copies are made
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    other = small_llama()
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(model), logits(other))


def test_a_model_in_fp32_is_left_alone() -> None:
    assert fast_modules.install(small_llama().float(), packed=True) == {}


def test_a_policy_that_is_not_trained_keeps_one_copy_of_its_weights(sharp_folder: Path) -> None:
    trained = load_policy(sharp_folder, dtype="bfloat16")
    frozen = load_policy(sharp_folder, dtype="bfloat16", trained=False)

    def packed(policy: Any) -> int:
        return sum(isinstance(m.forward, fast_modules._Packed) for m in policy.model.modules())

    assert packed(trained) > 0 and packed(frozen) == 0


def test_a_copy_of_a_model_computes_with_its_own_weights() -> None:
    model = small_llama()
    fast_modules.install(model, packed=True)
    before = logits(model)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(again), before)
        with torch.no_grad():
            for parameter in again.parameters():
                parameter.zero_()
        assert not logits(again).any()
    assert torch.equal(logits(model), before)


def test_a_layer_whose_output_is_zero_proves_nothing_and_keeps_its_forward() -> None:
    model = small_llama()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.layers[1].self_attn.o_proj.weight.zero_()
    counts = fast_modules.install(model, packed=False)
    assert (counts["gates"], counts["attention"]) == (1, 1)


class EarlyWeight(LlamaRMSNorm):
    """It multiplies by the weight before it rounds: the same while weights are one."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        wide = hidden_states.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight.float() * normed).to(hidden_states.dtype)


def test_a_norm_that_differs_only_for_other_weights_is_found_out() -> None:
    model = small_llama()
    model.model.norm.__class__ = type("EarlyRMSNorm", (EarlyWeight,), {})
    assert fast_modules.install(model, packed=False)["norms"] == 4

"""An adapter beside frozen weights: what moves, what it computes, and that sampling agrees."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from pydantic import ValidationError

from posttrain.config import LoraConfig, OptimConfig
from posttrain.data.packing import pack
from posttrain.data.prefix_tree import build_prefix_tree
from posttrain.errors import ConfigError, MissingDependencyError
from posttrain.training.forward import score_tokens
from posttrain.training.optimizer import MasterOptimizer
from posttrain.training.policy import Policy, load_policy
from posttrain.types import SamplingParams

SEQUENCES = [np.arange(4, 20, dtype=np.int32), np.arange(4, 14, dtype=np.int32)[::-1].copy()]
Q_PROJ = "model.layers.1.self_attn.q_proj"


def load(folder: Path, dtype: Any = "float32", seed: int = 0, **settings: Any) -> Policy:
    return load_policy(folder, dtype=dtype, lora=LoraConfig(**settings), seed=seed)


def logits_of(policy: Policy) -> torch.Tensor:
    with torch.no_grad():
        return policy.logits(policy.tree_hidden(build_prefix_tree(SEQUENCES)))


def backward(policy: Policy) -> None:
    logits = policy.logits(policy.tree_hidden(build_prefix_tree(SEQUENCES)))
    logits.log_softmax(-1)[:, 5].sum().backward()


def train(policy: Policy, optimizer: MasterOptimizer, num_steps: int = 2) -> None:
    for _ in range(num_steps):
        optimizer.zero_grad()
        backward(policy)
        optimizer.update(1e-2, optimizer.grad_norm())


def fill_b(policy: Policy, scale: float = 0.1) -> None:
    """An adapter that was trained: B is zero only at the start."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, param in policy.model.named_parameters():
            if ".lora_B." in name:
                param.copy_(torch.randn(param.shape, generator=draw) * scale)


def tied_folder(make_folder: Callable[..., Path]) -> Path:
    return make_folder(
        transformers.Qwen2Config,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )


# --- what moves ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_training_moves_every_part_of_the_adapter_and_no_base_weight(
    dtype: Any, sharp_folder: Path
) -> None:
    policy = load(sharp_folder, dtype, rank=4)
    before = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
    optimizer = MasterOptimizer(policy, OptimConfig())
    assert optimizer.masters and all(".lora_" in name for name in optimizer.masters)
    assert all(m.dtype == torch.float32 for m in optimizer.masters.values())
    assert {p.dtype for p in policy.model.parameters()} == {policy.dtype}, "one compute type"
    train(policy, optimizer)
    for name, param in policy.model.named_parameters():
        assert torch.equal(param, before[name]) == (".lora_" not in name), name
    original = load_policy(sharp_folder, dtype=dtype).model
    for name, weight in original.named_parameters():
        parts = name.split(".")
        kept = ".".join([*parts[:-1], "base_layer", parts[-1]])
        assert torch.equal(weight, before.get(kept, before.get(name))), name


def test_a_new_adapter_changes_nothing_to_the_last_bit(sharp_folder: Path) -> None:
    policy = load(sharp_folder, "bfloat16")
    assert torch.equal(logits_of(policy), logits_of(load_policy(sharp_folder, dtype="bfloat16")))
    assert not any(m.training for m in policy.model.modules())


def test_the_first_a_depends_on_the_seed_and_the_layer_alone(sharp_folder: Path) -> None:
    """Neither on torch's generator, which stays as it was, nor on which other layers there are."""

    def first_a(seed: int, **settings: Any) -> torch.Tensor:
        state = torch.get_rng_state()
        policy = load(sharp_folder, seed=seed, rank=4, **settings)
        assert torch.equal(torch.get_rng_state(), state)
        return policy.model.get_parameter(f"{Q_PROJ}.lora_A.default.weight").detach()

    with torch.random.fork_rng():
        torch.manual_seed(1)
        one = first_a(7)
        torch.manual_seed(2)
        assert torch.equal(first_a(7, target_modules=["q_proj"]), one)
        assert not torch.equal(first_a(8), one)
    bound = 32**-0.5
    assert one.abs().max() <= bound and one.std() == pytest.approx(bound / math.sqrt(3), rel=0.15)


def test_layers_do_not_share_their_first_a(sharp_folder: Path) -> None:
    model = load(sharp_folder, rank=4).model
    one, other = (
        model.get_parameter(f"model.layers.{i}.self_attn.q_proj.lora_A.default.weight")
        for i in (0, 1)
    )
    assert not torch.equal(one, other)


def test_the_output_head_is_no_target_unless_it_is_named(sharp_folder: Path) -> None:
    assert not any("lm_head.lora" in n for n, _ in load(sharp_folder).model.named_parameters())
    policy = load(sharp_folder, target_modules=["lm_head"])
    trained = [n for n, p in policy.model.named_parameters() if p.requires_grad]
    assert trained == ["lm_head.lora_A.default.weight", "lm_head.lora_B.default.weight"]
    before = logits_of(policy)
    fill_b(policy)
    assert not torch.equal(logits_of(policy), before)
    assert policy.vocab_size == load_policy(sharp_folder, dtype="float32").vocab_size


def test_modules_can_be_trained_whole_beside_the_adapter(sharp_folder: Path) -> None:
    policy = load(sharp_folder, target_modules=["q_proj"], train_also=["model.norm"])
    optimizer = MasterOptimizer(policy, OptimConfig())
    whole = [name for name in optimizer.masters if ".lora_" not in name]
    assert whole == ["model.norm.modules_to_save.default.weight"]
    before = logits_of(policy)
    train(policy, optimizer)
    base = load_policy(sharp_folder, dtype="float32")
    with policy.adapter_disabled():
        assert torch.equal(logits_of(policy), logits_of(base))
    assert not torch.equal(
        optimizer.masters[whole[0]], base.model.get_parameter("model.norm.weight")
    )
    assert not torch.equal(logits_of(policy), before)


# --- what it computes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "scaling"),
    [
        ({"rank": 4, "alpha": 4}, 1.0),
        ({"rank": 4, "alpha": 32}, 8.0),
        ({"rank": 2, "alpha": 3}, 1.5),
        ({"rank": 16, "alpha": 32, "rslora": True}, 8.0),
    ],
)
def test_the_update_is_alpha_over_rank_times_b_a(
    settings: dict[str, Any], scaling: float, sharp_folder: Path
) -> None:
    """W x + alpha / rank * B A x (arXiv:2106.09685, section 4.1); alpha / sqrt(rank) for rsLoRA."""
    policy = load(sharp_folder, **settings)
    fill_b(policy)
    layer = policy.model.get_submodule(Q_PROJ)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert a.shape[0] == b.shape[1] == settings["rank"]
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    expected = x @ layer.base_layer.weight.T + scaling * (x @ a.T @ b.T)
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rank", [1, 3, 16])
def test_sampler_and_learner_agree_to_the_last_bit_with_an_adapter_on(
    rank: int, sharp_folder: Path, sample_all: Callable[..., Any], make: Any
) -> None:
    """a09, a13 with an adapter: a rank of 1 makes products small enough for other kernels."""
    policy = load(sharp_folder, "bfloat16", rank=rank)
    fill_b(policy, 0.3)
    rng = np.random.default_rng(3)
    trunk = rng.integers(4, policy.vocab_size, 62).astype(np.int32)
    prompts = [trunk, trunk, trunk[:30], trunk[:9]]
    params = SamplingParams(6, temperature=0.6, ignore_eos=True)
    completions = sample_all(policy, prompts, params)
    samples = [
        make.sample(p, c, draw_id=i)
        for i, (p, c) in enumerate(zip(prompts, completions, strict=True))
    ]
    sampled = torch.from_numpy(np.concatenate([c.sampler_logprobs for c in completions]))
    with torch.no_grad():
        parts = [score_tokens(policy, m, 0.6).policy_logprobs_N for m in pack(samples, 4096)]
        base = load_policy(sharp_folder, dtype="bfloat16")
        without = [score_tokens(base, m, 0.6).policy_logprobs_N for m in pack(samples, 4096)]
    assert float((torch.cat(parts) - sampled).abs().max()) == 0
    assert float((torch.cat(without) - sampled).abs().max()) > 0.1, "the adapter says something"


def test_gradient_checkpointing_changes_no_gradient_of_an_adapter(sharp_folder: Path) -> None:
    grads = []
    for recompute in (False, True):
        policy = load_policy(
            sharp_folder, dtype="float32", gradient_checkpointing=recompute, lora=LoraConfig(rank=4)
        )
        fill_b(policy)
        backward(policy)
        grads.append({n: p.grad for n, p in policy.model.named_parameters() if p.requires_grad})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        assert grad is not None and torch.equal(grad, grads[1][name]), name


# --- the base as reference ------------------------------------------------------------------------


def test_a_disabled_adapter_is_the_base_model_and_then_the_adapter_again(
    sharp_folder: Path,
) -> None:
    policy = load(sharp_folder, "bfloat16", rank=4)
    fill_b(policy)
    adapted, base = logits_of(policy), logits_of(load_policy(sharp_folder, dtype="bfloat16"))
    assert not torch.equal(adapted, base)
    with policy.adapter_disabled():
        assert torch.equal(logits_of(policy), base)
    assert torch.equal(logits_of(policy), adapted)
    with pytest.raises(RuntimeError, match="inside"), policy.adapter_disabled():
        raise RuntimeError("inside")
    assert torch.equal(logits_of(policy), adapted)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_reference_pass_between_forward_and_backward_changes_no_gradient(
    dtype: Any, sharp_folder: Path
) -> None:
    """peft switches requires_grad off meanwhile; the hooks that feed the masters must survive."""
    grads = []
    for look_aside in (False, True):
        policy = load(sharp_folder, dtype, rank=4)
        fill_b(policy)
        optimizer = MasterOptimizer(policy, OptimConfig())
        logits = policy.logits(policy.tree_hidden(build_prefix_tree(SEQUENCES)))
        if look_aside:
            with policy.adapter_disabled():
                logits_of(policy)
        logits.log_softmax(-1)[:, 5].sum().backward()
        grads.append({n: m.grad for n, m in optimizer.masters.items()})
    for name, grad in grads[0].items():
        assert grad is not None and grad.abs().max() > 0
        assert torch.equal(grad, grads[1][name]), name


def test_without_an_adapter_there_is_nothing_to_disable(read_policy: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="has no adapter.*set model.lora"):
        read_policy("sharp").adapter_disabled()


# --- save, restore, hash ------------------------------------------------------------------------


def test_a_restored_adapter_is_the_saved_one_and_goes_on_like_it(
    sharp_folder: Path, tmp_path: Path
) -> None:
    policy = load(sharp_folder, "bfloat16", rank=4)
    optimizer = MasterOptimizer(policy, OptimConfig())
    train(policy, optimizer)
    optimizer.save(tmp_path)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    trained = sum(m.numel() for m in optimizer.masters.values())
    assert size == pytest.approx(12 * trained, rel=0.3), "masters and moments of the adapter alone"
    again = load(sharp_folder, "bfloat16", rank=4, seed=99)
    other = MasterOptimizer(again, OptimConfig())
    assert other.weights_hash() != optimizer.weights_hash()
    other.restore(tmp_path)
    assert other.weights_hash() == optimizer.weights_hash()
    assert torch.equal(logits_of(again), logits_of(policy))
    train(policy, optimizer)
    train(again, other)
    assert other.weights_hash() == optimizer.weights_hash()


def test_the_hash_sees_adapter_and_frozen_weights(sharp_folder: Path) -> None:
    def weights_hash(change: str | None = None) -> str:
        policy = load(sharp_folder, "bfloat16", rank=4)
        if change is not None:
            with torch.no_grad():
                policy.model.get_parameter(change).view(-1)[-1] += 1
        return MasterOptimizer(policy, OptimConfig()).weights_hash()

    hashes = [
        weights_hash(),
        weights_hash(f"{Q_PROJ}.base_layer.weight"),
        weights_hash("model.norm.weight"),
        weights_hash(f"{Q_PROJ}.lora_B.default.weight"),
    ]
    assert len(set(hashes)) == 4
    assert weights_hash() == hashes[0]


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        ({"rank": 0}, "greater than or equal to 1"),
        ({"alpha": 0}, "greater than or equal to 1"),
        ({"target_modules": "q_proj"}, 'write "all-linear" or a list of names'),
        ({"target_modules": []}, 'write "all-linear" or a list of names'),
        ({"target_modules": [""]}, "at least 1 character"),
        ({"dropout": 0.1}, "Extra inputs are not permitted"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], fact: str) -> None:
    with pytest.raises(ValidationError, match=fact):
        LoraConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        (
            {"target_modules": ["v_proj", "q_prj"]},
            r"target_modules: q_prj is no linear layer of .*, which has q_proj, k_proj, v_proj, "
            r"o_proj, gate_proj, up_proj, down_proj, lm_head; did you mean q_proj\?",
        ),
        ({"target_modules": ["norm"]}, "norm is no linear layer"),
        ({"target_modules": ["proj"]}, "proj is no linear layer"),
        ({"train_also": ["lm_heat"]}, r"lm_heat is no module with weights.*mean lm_head\?"),
        ({"train_also": ["q_proj"]}, "train_also: .*q_proj is adapted already"),
    ],
)
def test_a_wrong_module_name_names_the_modules_there_are(
    settings: dict[str, Any], fact: str, sharp_folder: Path
) -> None:
    with pytest.raises(ConfigError, match=fact):
        load(sharp_folder, **settings)


@pytest.mark.parametrize("setting", ["target_modules", "train_also"])
def test_a_tied_weight_is_not_trained_in_one_place_alone(
    setting: str, make_folder: Callable[..., Path]
) -> None:
    with pytest.raises(ConfigError, match=f"{setting}: the weight of lm_head in .* is tied"):
        load(tied_folder(make_folder), **{setting: ["lm_head"]})


def test_without_peft_an_adapter_is_refused_with_the_remedy_and_the_rest_works(
    sharp_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingDependencyError, match=r'pip install "posttrain\[lora\]"'):
        load(sharp_folder)
    assert load_policy(sharp_folder, dtype="float32").adapter is None

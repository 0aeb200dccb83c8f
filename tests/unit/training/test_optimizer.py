"""fp32 masters behind bf16 weights: nothing small is lost, nothing damaged is restored."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from posttrain.config import OptimConfig
from posttrain.errors import JournalCorruptError
from posttrain.training.optimizer import MasterOptimizer
from posttrain.training.policy import load_policy
from posttrain.types import TrainBatch

FILES = ("masters.safetensors", "moments.safetensors")


def gradient_of_ones(optimizer: MasterOptimizer, scale: float = 1.0) -> None:
    for param in optimizer._params.values():
        (param.float().sum() * scale).backward()


def test_updates_too_small_for_bf16_add_up_over_steps(sharp_folder: Path) -> None:
    """Each step moves a weight by 2e-5, far below half a bf16 unit of weights near 1: without
    masters nothing would ever move."""
    policy = load_policy(sharp_folder, dtype="bfloat16")
    optimizer = MasterOptimizer(policy, OptimConfig(lr=2e-5, beta1=0.0, beta2=0.0))
    name = "model.norm.weight"
    start = policy.model.get_parameter(name).detach().clone()
    assert torch.equal(start, torch.ones_like(start))
    moved = []
    for _ in range(250):
        optimizer.zero_grad()
        optimizer._masters[name].grad.fill_(1.0)  # type: ignore[union-attr]
        optimizer.update(2e-5, 1.0)
        moved.append(not torch.equal(policy.model.get_parameter(name), start))
    assert not any(moved[:90]) and moved[-1]
    expected = torch.full_like(start, 1 - 250 * 2e-5, dtype=torch.float32)
    torch.testing.assert_close(optimizer._masters[name], expected, rtol=0, atol=1e-5)
    assert torch.equal(policy.model.get_parameter(name), expected.bfloat16())


def test_gradients_of_many_microbatches_add_up_in_fp32(sharp_folder: Path) -> None:
    """1 + 200 x 2^-10: in bf16 every addend after the first would be lost."""
    policy = load_policy(sharp_folder, dtype="bfloat16")
    optimizer = MasterOptimizer(policy, OptimConfig())
    gradient_of_ones(optimizer)
    for _ in range(200):
        gradient_of_ones(optimizer, 2.0**-10)
    for name, master in optimizer._masters.items():
        assert master.dtype == torch.float32
        assert torch.equal(master.grad, torch.full_like(master, 1 + 200 * 2.0**-10)), name
        assert policy.model.get_parameter(name).grad is None, "no second copy in bf16"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_gradient_is_clipped_to_its_global_norm(dtype: Any, sharp_folder: Path) -> None:
    policy = load_policy(sharp_folder, dtype=dtype)
    optimizer = MasterOptimizer(policy, OptimConfig(max_grad_norm=0.5))
    gradient_of_ones(optimizer)
    count = sum(p.numel() for p in optimizer._masters.values())
    norm = optimizer.grad_norm()
    assert norm == pytest.approx(count**0.5, rel=1e-5)
    optimizer.update(0.0, norm)
    assert optimizer.grad_norm() == pytest.approx(0.5, rel=1e-5)
    optimizer.zero_grad()
    assert optimizer.grad_norm() == 0


def test_tied_embeddings_have_one_master_and_stay_tied(
    make_folder: Callable[..., Path],
    make_learner: Callable[..., Any],
    on_policy: Callable[..., TrainBatch],
    tmp_path: Path,
) -> None:
    folder = make_folder(
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
    learner = make_learner("bfloat16", folder)
    before = learner.weights_hash()
    learner.step(on_policy(learner))
    model = learner._policy.model
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    learner.save(tmp_path)
    names = load_file(tmp_path / FILES[0]).keys()
    assert "lm_head.weight" not in names and "model.embed_tokens.weight" in names
    again = make_learner("bfloat16", folder)
    again.restore(tmp_path)
    assert again.weights_hash() == learner.weights_hash() != before


def test_the_hash_sees_one_bit_of_one_master(sharp_folder: Path) -> None:
    policy = load_policy(sharp_folder, dtype="bfloat16")
    optimizer = MasterOptimizer(policy, OptimConfig())
    before = optimizer.weights_hash()
    weight = optimizer._masters["model.norm.weight"]
    with torch.no_grad():
        weight[3] = torch.nextafter(weight[3], torch.tensor(2.0))
    assert optimizer.weights_hash() != before


# --- save and restore -----------------------------------------------------------------------------


@pytest.fixture
def saved(
    make_learner: Callable[..., Any], on_policy: Callable[..., TrainBatch], tmp_path: Path
) -> tuple[Any, Path, TrainBatch]:
    """A learner after two steps, the folder it was saved to, and the batch of the next step."""
    learner = make_learner("bfloat16")
    batch = on_policy(learner)
    for step in (1, 2):
        learner.step(replace(batch, step=step))
    learner.save(tmp_path)
    return learner, tmp_path, replace(batch, step=3)


def moments(learner: Any) -> dict[str, torch.Tensor]:
    optimizer = learner._optimizer
    return {
        f"{key}/{name}": value.clone()
        for name, master in optimizer._masters.items()
        for key, value in optimizer._adam.state[master].items()
    }


def test_a_restored_learner_is_the_saved_one_to_the_bit_and_stays_so(
    saved: tuple[Any, Path, TrainBatch], make_learner: Callable[..., Any]
) -> None:
    """Weights, both moments, Adam's step counter and the version; then one more step on each."""
    learner, folder, batch = saved
    again = make_learner("bfloat16")
    again.restore(folder)
    assert again.policy_version == 2 and again.weights_hash() == learner.weights_hash()
    expected, actual = moments(learner), moments(again)
    assert expected.keys() == actual.keys() and len(expected) % 3 == 0
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name
    results = [one.step(batch) for one in (learner, again)]
    assert results[0].weights_hash == results[1].weights_hash
    for one, other in zip(
        learner._policy.model.parameters(), again._policy.model.parameters(), strict=True
    ):
        assert torch.equal(one, other)


def test_a_learner_that_went_on_can_be_taken_back(saved: tuple[Any, Path, TrainBatch]) -> None:
    """Nothing of the later step remains, moments and counters included."""
    learner, folder, batch = saved
    first = learner.step(batch).weights_hash
    learner.restore(folder)
    assert learner.step(batch).weights_hash == first


def test_a_checkpoint_of_the_start_takes_the_moments_away_again(
    make_learner: Callable[..., Any], on_policy: Callable[..., TrainBatch], tmp_path: Path
) -> None:
    learner = make_learner("bfloat16")
    learner.save(tmp_path)
    batch = on_policy(learner)
    first = learner.step(batch).weights_hash
    learner.step(replace(batch, step=2))
    learner.restore(tmp_path)
    assert (learner.policy_version, learner._optimizer.num_updates) == (0, 0)
    assert learner.step(batch).weights_hash == first


def test_a_run_of_skipped_steps_is_still_counted_after_a_restore(
    make_learner: Callable[..., Any], tmp_path: Path
) -> None:
    learner = make_learner()
    learner._skipped_in_a_row = 2
    learner.save(tmp_path)
    again = make_learner()
    again.restore(tmp_path)
    assert again._skipped_in_a_row == 2


def test_the_learning_rate_goes_on_after_a_restore(
    make_learner: Callable[..., Any], on_policy: Callable[..., TrainBatch], tmp_path: Path
) -> None:
    """f03: the warm-up is not repeated."""
    optim = {"lr": 1.0, "warmup_steps": 4}
    learner = make_learner(optim=optim)
    batch = on_policy(learner, scale=0.0)
    rates = [learner.step(replace(batch, step=s)).metrics["learner/lr"] for s in (1, 2)]
    learner.save(tmp_path)
    again = make_learner(optim=optim)
    again.restore(tmp_path)
    rates += [again.step(replace(batch, step=s)).metrics["learner/lr"] for s in (3, 4, 5)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(bytes(data))


def _shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


@pytest.mark.parametrize("damage", [_flip, _shorten, Path.unlink], ids=["bit", "tail", "gone"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_refused_before_anything_is_taken_over(
    name: str,
    damage: Callable[[Path], None],
    saved: tuple[Any, Path, TrainBatch],
    make_learner: Callable[..., Any],
) -> None:
    _, folder, _ = saved
    damage(folder / name)
    learner = make_learner("bfloat16")
    before = learner.weights_hash()
    with pytest.raises(JournalCorruptError, match=f"{name} does not match.*delete that folder"):
        learner.restore(folder)
    assert (learner.weights_hash(), learner.policy_version) == (before, 0)
    assert learner._optimizer.num_updates == 0


def test_the_saved_facts_name_the_hash_of_each_file(saved: tuple[Any, Path, TrainBatch]) -> None:
    facts = json.loads((saved[1] / "optimizer.json").read_text())
    assert set(facts["sha256"]) == set(FILES)

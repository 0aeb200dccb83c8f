"""From packed samples to log-probs: invariances, memory, and mutants that must be noticed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from posttrain.data import packing
from posttrain.data.packing import pack
from posttrain.training import forward
from posttrain.training.attention import TreeLayout
from posttrain.training.forward import HEAD_ROWS, score_tokens
from posttrain.training.policy import Policy, load_policy
from posttrain.types import SamplingParams, TrainSample

TEMPERATURE = 0.6


@pytest.fixture(scope="module")
def samples_of(sample_all: Callable[..., Any], make: SimpleNamespace) -> Callable[..., Any]:
    """On-policy samples with siblings, nested prompts and lengths around the 64-key border."""

    def build(policy: Policy) -> list[TrainSample]:
        rng = np.random.default_rng(3)
        trunk = rng.integers(4, policy.vocab_size, 62).astype(np.int32)
        other = rng.integers(4, policy.vocab_size, 17).astype(np.int32)
        prompts = [trunk, trunk, trunk[:30], other, trunk[:61], other]
        params = SamplingParams(5, temperature=TEMPERATURE, ignore_eos=True)
        completions = sample_all(policy, prompts, params)
        return [
            make.sample(p, c, advantage=(-1.0) ** i, draw_id=i)
            for i, (p, c) in enumerate(zip(prompts, completions, strict=True))
        ]

    return build


def scores(policy: Policy, samples: Sequence[TrainSample], max_tokens: int) -> torch.Tensor:
    """Log-probs of all samples, packed under a budget, in order."""
    with torch.no_grad():
        parts = [score_tokens(policy, m, TEMPERATURE) for m in pack(samples, max_tokens)]
    return torch.cat([p.policy_logprobs_N for p in parts])


def mismatch(policy: Policy, samples: Sequence[TrainSample]) -> float:
    """Largest difference between the learner's log-probs and the sampler's."""
    sampled = np.concatenate([s.sampler_logprobs[s.loss_mask] for s in samples])
    return float((scores(policy, samples, 4096) - torch.from_numpy(sampled)).abs().max())


def test_on_policy_the_learner_sees_what_the_sampler_saw(
    read_policy: Callable[..., Any], samples_of: Callable[..., Any]
) -> None:
    """a09, a13: fp32 to 1e-5, bf16 to the last bit."""
    exact, close = read_policy("sharp", "bfloat16"), read_policy("sharp")
    assert mismatch(exact, samples_of(exact)) == 0
    assert mismatch(close, samples_of(close)) < 1e-5


def _own_row(path: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    trained = np.flatnonzero(mask)
    return path[trained], path[trained]


def _two_rows_back(path: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    trained = np.flatnonzero(mask)
    return path[trained - 2], path[trained]


def _tree_as_one_sequence(self: Policy, tree: Any) -> torch.Tensor:
    everything = (np.arange(tree.num_rows),)
    return self.hidden(
        torch.from_numpy(tree.token_ids),
        torch.from_numpy(tree.position_ids),
        lambda rows: TreeLayout(everything, (0,), rows),
    )


def _rows_as_positions(self: Policy, tree: Any) -> torch.Tensor:
    return self.hidden(
        torch.from_numpy(tree.token_ids),
        torch.arange(tree.num_rows),
        lambda rows: TreeLayout(tree.paths, tree.first_owned, rows),
    )


def _branch_without_its_trunk(self: Policy, tree: Any) -> torch.Tensor:
    owned = tuple(p[f:] for p, f in zip(tree.paths, tree.first_owned, strict=True))
    return self.hidden(
        torch.from_numpy(tree.token_ids),
        torch.from_numpy(tree.position_ids),
        lambda rows: TreeLayout(owned, (0,) * len(owned), rows),
    )


def _at_temperature_one(
    logits: torch.Tensor, labels: torch.Tensor, _temperature: float
) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]


@pytest.mark.parametrize(
    ("target", "name", "mutant"),
    [
        (packing, "label_rows", _own_row),
        (packing, "label_rows", _two_rows_back),
        (Policy, "tree_hidden", _tree_as_one_sequence),
        (Policy, "tree_hidden", _rows_as_positions),
        (Policy, "tree_hidden", _branch_without_its_trunk),
        (forward, "token_logprobs", _at_temperature_one),
    ],
)
def test_a_mutant_is_noticed(
    target: Any,
    name: str,
    mutant: Any,
    read_policy: Callable[..., Any],
    samples_of: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """a08, a13: a shift by one, foreign keys, foreign positions, a temperature left out."""
    policy = read_policy("sharp")
    samples = samples_of(policy)
    monkeypatch.setattr(target, name, mutant)
    assert mismatch(policy, samples) > 1e-2


def test_the_tempered_log_prob_is_that_of_divided_logits(make: SimpleNamespace) -> None:
    """a08: logits [2, 0], token 0, T = 0.5 give -0.01815, not the untempered -0.12693."""

    class TwoLogits:
        kernel_logits = False

        @staticmethod
        def tree_hidden(micro: Any) -> torch.Tensor:
            return torch.tensor([[2.0, 0.0]]).repeat(micro.num_rows, 1)

        @staticmethod
        def logits(hidden: torch.Tensor) -> torch.Tensor:
            return hidden

    (micro,) = pack([make.sample(np.array([1], np.int32), make.completion([0]))], 10)
    out = score_tokens(TwoLogits(), micro, 0.5)  # type: ignore[arg-type]
    assert float(out.policy_logprobs_N) == pytest.approx(-0.0181499, abs=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_log_probs_do_not_depend_on_what_is_packed_together(
    dtype: str, read_policy: Callable[..., Any], samples_of: Callable[..., Any]
) -> None:
    """Shared prefixes, budgets and order change no bit in bf16 and at most 1e-5 in fp32."""
    policy = read_policy("sharp", dtype)
    samples = samples_of(policy)
    together = scores(policy, samples, 4096)
    alone = torch.cat([scores(policy, [s], 4096) for s in samples])
    backwards = torch.cat(scores(policy, samples[::-1], 4096).split(5)[::-1])
    cut = scores(policy, samples, 100)
    tolerance = 0 if dtype == "bfloat16" else 1e-5
    for other in (alone, backwards, cut):
        torch.testing.assert_close(other, together, rtol=0, atol=tolerance)


def test_gradients_do_not_depend_on_what_is_packed_together(
    sharp_folder: Any, read_policy: Callable[..., Any], samples_of: Callable[..., Any]
) -> None:
    """Backward through shared rows adds up what each sample gives alone."""
    samples = samples_of(read_policy("sharp"))

    def gradient(cuts: Sequence[Sequence[TrainSample]]) -> torch.Tensor:
        policy = load_policy(sharp_folder, dtype="float32")
        for cut in cuts:
            (micro,) = pack(cut, 10_000)
            out = score_tokens(policy, micro, TEMPERATURE)
            (
                out.policy_logprobs_N * torch.from_numpy(micro.streams["policy"].weights)
            ).sum().backward()
        return torch.cat([p.grad.flatten() for p in policy.model.parameters()])

    whole, alone = gradient([samples]), gradient([[s] for s in samples])
    assert float((whole - alone).norm() / alone.norm()) < 1e-5


def test_gradient_checkpointing_runs_each_layer_twice_and_changes_nothing(
    sharp_folder: Any, read_policy: Callable[..., Any], samples_of: Callable[..., Any]
) -> None:
    samples = samples_of(read_policy("sharp"))
    runs: dict[bool, int] = {True: 0, False: 0}

    def gradient(checkpointing: bool) -> torch.Tensor:
        policy = load_policy(sharp_folder, dtype="float32", gradient_checkpointing=checkpointing)
        first = policy.model.base_model.layers[0].mlp
        first.register_forward_pre_hook(
            lambda *_: runs.update({checkpointing: runs[checkpointing] + 1})
        )
        (micro,) = pack(samples, 10_000)
        score_tokens(policy, micro, TEMPERATURE).policy_logprobs_N.sum().backward()
        return torch.cat([p.grad.flatten() for p in policy.model.parameters()])

    torch.testing.assert_close(gradient(True), gradient(False), rtol=0, atol=0)
    assert runs == {True: 2, False: 1}


def test_the_entropy_is_that_of_the_sampled_distribution_and_carries_no_gradient(
    read_policy: Callable[..., Any], samples_of: Callable[..., Any]
) -> None:
    """h03: equal to the naive formula."""
    policy = read_policy("sharp")
    (micro,) = pack(samples_of(policy), 4096)
    out = score_tokens(policy, micro, TEMPERATURE)
    with torch.no_grad():
        hidden = policy.tree_hidden(micro)[torch.from_numpy(micro.predict_rows)]
        logp = (policy.logits(hidden) / TEMPERATURE).log_softmax(-1)
    torch.testing.assert_close(out.entropy_N, -(logp.exp() * logp).sum(-1), rtol=1e-5, atol=1e-5)
    assert not out.entropy_N.requires_grad


def test_no_more_than_a_fixed_number_of_logit_rows_ever_exists(
    read_policy: Callable[..., Any], make: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """h01, h02, h03: the head runs in pieces, in forward, entropy and the recomputing backward;
    rows that predict no trained token never get logits."""
    policy = read_policy("tiny")
    rows: list[int] = []
    logits = Policy.logits
    monkeypatch.setattr(
        Policy, "logits", lambda self, hidden: rows.append(len(hidden)) or logits(self, hidden)
    )
    saved: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-1:] == (policy.vocab_size,) and tensor.requires_grad:
            saved.append(len(tensor))
        return tensor

    prompt = np.arange(4, 64, dtype=np.int32)
    sample = make.sample(prompt, make.completion(([5, 6, 7, 8] * 300)[:1100]))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = score_tokens(policy, pack([sample], 4096)[0], 1.0)
    out.policy_logprobs_N.sum().backward()
    policy.model.zero_grad()
    pieces = [HEAD_ROWS, HEAD_ROWS, 1100 - 2 * HEAD_ROWS]
    assert sorted(rows) == sorted(pieces * 2), "once forward, once recomputed, no prompt row"
    assert saved == [], "no [N, V] tensor is kept for backward"


def test_a_microbatch_without_trained_tokens_scores_nothing(
    read_policy: Callable[..., Any], make: SimpleNamespace
) -> None:
    sample = make.sample(np.array([5, 6], np.int32), make.completion([]))
    out = score_tokens(read_policy("tiny"), pack([sample], 10)[0], 1.0)
    assert out.policy_logprobs_N.tolist() == out.entropy_N.tolist() == []

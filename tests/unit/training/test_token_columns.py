"""Micro-batches as columns: streams keep their tokens, groups their names, steps their counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from posttrain.algo.builder import build_algorithm
from posttrain.config import Recipe, ReverseConfig, RlooConfig
from posttrain.data.packing import pack
from posttrain.training.learner import InlineLearner
from posttrain.training.policy import load_policy
from posttrain.training.token_columns import (
    GlobalCounts,
    Work,
    key_of,
    known_columns,
    of_stream,
    prepare_whole_step,
    stream_of,
)
from posttrain.types import SamplingParams, Stream, TrainBatch, TrainSample


def sample(draw_id: int, index: int, length: int, streams: dict[str, float]) -> TrainSample:
    """A prompt of 2 tokens and `length` trained ones, each of them different everywhere."""
    mask = np.arange(2 + length) >= 2
    tokens = np.arange(2 + length) + 10 * index + 100 * draw_id
    return TrainSample(
        token_ids=np.where(mask, tokens, 1).astype(np.int32),
        loss_mask=mask,
        sampler_logprobs=np.where(mask, -tokens / 1000, 0).astype(np.float32),
        policy_versions=np.where(mask, draw_id, -1).astype(np.int32),
        turn_index=np.where(mask, 0, -1).astype(np.int32),
        streams={n: np.where(mask, w, 0).astype(np.float32) for n, w in streams.items()},
        draw_id=draw_id,
        sample_index=index,
    )


SAMPLES = [
    sample(7, 0, 3, {"policy": 1.0}),
    sample(7, 1, 2, {"policy": -1.0, "imitation": 1.0}),
    sample(4, 0, 1, {"imitation": 0.5}),
    sample(9, 2, 4, {"policy": 2.0}),
    sample(9, 5, 2, {"policy@b": 3.0}),
]


@dataclass(frozen=True)
class Reader:
    """A component that only reads: its columns at `prepare` are kept."""

    stream: str = "policy"
    kind: str = "policy"
    whole_step: bool = True

    def prepare(self, columns: Any, state: Any) -> dict[str, Tensor]:
        state[key_of(self)] = columns  # type: ignore[arg-type]
        position_N = torch.arange(len(columns["weights_N"]))
        return {"position_N": position_N, "logprobs_N": columns["sampler_logprobs_N"]}


def test_a_stream_is_the_tokens_of_its_samples_with_their_weights() -> None:
    (micro,) = pack(SAMPLES, 1000)
    columns = of_stream(known_columns(micro), micro.streams["policy"])
    expected = [s for s in SAMPLES if "policy" in s.streams]
    logprobs = np.concatenate([s.sampler_logprobs[s.loss_mask] for s in expected])
    weights = np.concatenate([s.streams["policy"][s.loss_mask] for s in expected])
    assert columns["sampler_logprobs_N"].tolist() == logprobs.tolist()
    assert columns["weights_N"].tolist() == weights.tolist()
    assert columns["sequence_index_N"].tolist() == [0] * 3 + [1] * 2 + [2] * 4
    assert columns["group_index_N"].tolist() == [0] * 5 + [1] * 4
    assert columns["trajectory_index_N"].tolist() == [0] * 3 + [1] * 2 + [2] * 4


def test_groups_and_trajectories_are_numbered_by_appearance_not_by_size_of_their_ids() -> None:
    (micro,) = pack([SAMPLES[3], SAMPLES[0]], 1000)
    columns = of_stream(known_columns(micro), micro.streams["policy"])
    assert columns["group_index_N"].tolist() == [0] * 4 + [1] * 3


def test_two_sequences_of_a_forked_trajectory_are_one_trajectory() -> None:
    forked = [SAMPLES[0], replace(SAMPLES[3], draw_id=7, sample_index=0)]
    (micro,) = pack(forked, 1000)
    columns = of_stream(known_columns(micro), micro.streams["policy"])
    assert columns["sequence_index_N"].tolist() == [0] * 3 + [1] * 4
    assert set(columns["trajectory_index_N"].tolist()) == {0}


def test_scalars_and_constants_pass_through_a_stream() -> None:
    (micro,) = pack(SAMPLES, 1000)
    columns = {**known_columns(micro), "seed": 5, "step": torch.tensor(3)}
    chosen = of_stream(columns, micro.streams["imitation"])
    assert chosen["seed"] == 5 and int(chosen["step"]) == 3


def test_a_micro_batch_without_the_stream_gives_it_nothing() -> None:
    (micro,) = pack([SAMPLES[2]], 1000)
    assert len(stream_of(Reader(), micro)) == 0  # type: ignore[arg-type]
    columns = of_stream(
        known_columns(micro), Stream(np.zeros(0, np.int64), np.zeros(0, np.float32))
    )
    assert len(columns["weights_N"]) == len(columns["sequence_index_N"]) == 0


@pytest.mark.parametrize("budget", [1, 7, 12, 1000])
def test_what_sees_the_whole_step_sees_the_same_however_it_is_cut(budget: int) -> None:
    """A group that two micro-batches share is one group there, and its columns come back to each
    micro-batch in place."""
    works = [Work(micro, known_columns(micro)) for micro in pack(SAMPLES, budget)]
    state: dict[str, Any] = {}
    prepare_whole_step(Reader(), works, {"step": 1}, state)  # type: ignore[arg-type]
    seen = state["policy:policy"]
    assert seen["group_index_N"].tolist() == [0] * 5 + [1] * 4
    assert seen["sequence_index_N"].tolist() == [0] * 3 + [1] * 2 + [2] * 4
    assert seen["bootstrap_S"].tolist() == [0.0] * 3
    positions = []
    for work in works:
        stream = work.micro.streams.get("policy")
        mine = work.prepared["policy:policy"]
        positions += mine["position_N"].tolist()
        known = work.known["sampler_logprobs_N"]
        expected = known[torch.from_numpy(stream.index)].tolist() if stream else []
        assert mine["logprobs_N"].tolist() == expected
    assert positions == list(range(9))


def test_a_step_without_the_stream_prepares_nothing() -> None:
    works = [Work(micro, known_columns(micro)) for micro in pack([SAMPLES[2]], 1000)]
    prepare_whole_step(Reader(), works, {}, {})  # type: ignore[arg-type]
    assert works[0].prepared == {}


@pytest.mark.parametrize("budget", [1, 7, 1000])
def test_counts_are_of_the_whole_step_and_of_all_streams_of_a_kind(budget: int) -> None:
    micros = pack(SAMPLES, budget)
    one, two = Reader(), Reader(stream="policy@b")
    imitation = Reader(stream="imitation", kind="imitation")
    counts = GlobalCounts([one, two, imitation], micros)  # type: ignore[list-item]
    of_sequences: dict[str, list[int]] = {"policy": [], "imitation": []}
    of_groups: list[int] = []
    for micro in micros:
        for component in (one, two, imitation):
            denominators = counts.denominators(component, micro)  # type: ignore[arg-type]
            whole = (
                denominators.num_loss_tokens,
                denominators.num_sequences,
                denominators.num_groups,
            )
            assert whole == {"policy": (11, 4, 2), "imitation": (3, 2, 2)}[component.kind]
            of_sequences[component.kind] += denominators.sequence_lengths_S.tolist()
            if component.kind == "policy":
                of_groups += denominators.group_lengths_S.tolist()
    assert sorted(of_sequences["policy"]) == [2, 2, 3, 4]
    assert sorted(of_sequences["imitation"]) == [1, 2]
    assert sorted(of_groups) == [5, 5, 6, 6], "each sequence knows the tokens of its whole group"


def test_a_step_without_any_stream_counts_as_nothing_to_do() -> None:
    assert not GlobalCounts([Reader(stream="other")], pack(SAMPLES, 1000))  # type: ignore[list-item]


@pytest.fixture
def learner_of(sharp_folder: Any) -> Callable[..., InlineLearner]:
    def build(of_environment: dict[str, Any]) -> InlineLearner:
        recipe = Recipe.model_validate(
            {
                "name": "t",
                "env": ReverseConfig(),
                "algo": RlooConfig(),
                "optim": {"lr": 1e-3},
                "learner": {"max_tokens_per_microbatch": 40},
            }
        )
        algorithm = build_algorithm(recipe.algo, of_environment)
        return InlineLearner(load_policy(sharp_folder, dtype="float32"), algorithm, recipe)

    return build


def test_one_algorithm_in_two_parts_takes_the_same_step_as_in_one(
    learner_of: Callable[..., InlineLearner], sample_all: Any, make: SimpleNamespace
) -> None:
    """Their denominators are common: a member of few tokens weighs what it would weigh alone."""
    one, two = learner_of({}), learner_of({"b": RlooConfig()})
    prompts = [np.array([5, 6 + i // 2, 7], np.int32) for i in range(6)]
    params = [SamplingParams(2 + 2 * i, ignore_eos=True) for i in range(6)]
    said = sample_all(one._policy, prompts, params)

    def batch(streams: list[str]) -> TrainBatch:
        samples = [
            make.sample(p, c, (-1.0) ** i, i // 2, i % 2, stream=streams[i // 2])
            for i, (p, c) in enumerate(zip(prompts, said, strict=True))
        ]
        return make.batch(samples)

    whole = one.step(batch(["policy"] * 3))
    split = two.step(batch(["policy", "policy@b", "policy"]))
    for name in ("learner/loss", "learner/grad_norm", "policy/ratio_mean"):
        if name in whole.metrics:
            assert split.metrics[name] == pytest.approx(whole.metrics[name], rel=1e-5), name
    for name, weights in one.masters.items():
        torch.testing.assert_close(two.masters[name], weights, rtol=0, atol=2e-5)
    assert any(
        not torch.equal(w, f)
        for w, f in zip(one.masters.values(), learner_of({}).masters.values(), strict=True)
    )

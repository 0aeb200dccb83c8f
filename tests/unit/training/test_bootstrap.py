"""What a critic says of a trajectory that a limit cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from posttrain.algo.aggregation import Denominators
from posttrain.data.packing import pack
from posttrain.training.token_columns import Work, cut_ends, known_columns, prepare_whole_step
from posttrain.types import TrainSample


def sample(draw_id: int, cut: bool) -> TrainSample:
    mask = np.array([False, True, True])
    return TrainSample(
        token_ids=np.array([1, 2, 3 + draw_id], np.int32),
        loss_mask=mask,
        sampler_logprobs=np.zeros(3, np.float32),
        policy_versions=np.array([-1, 0, 0], np.int32),
        turn_index=np.array([-1, 0, 0], np.int32),
        streams={"policy": np.array([0, 0, 1], np.float32)},
        draw_id=draw_id,
        sample_index=0,
        cut=cut,
    )


class Recorder:
    """A component that keeps what it was given."""

    stream, kind = "policy", "policy"
    whole_step = needs_prox = follows_policy = True
    columns = frozenset[str]()

    def prepare(self, columns, state):
        self.seen = columns
        return {"advantages_N": columns["weights_N"]}

    def loss(self, columns, denominators: Denominators, state):
        raise AssertionError("not asked for")


def test_only_the_last_token_of_a_cut_sample_is_bootstrapped() -> None:
    (micro,) = pack([sample(0, True), sample(1, False)], 100)
    assert cut_ends(micro).tolist() == [False, True, False, False]


@pytest.mark.parametrize("budget", [1, 100])
def test_the_value_after_the_cut_reaches_its_trajectory_in_any_packing(budget: int) -> None:
    works = [Work(m, known_columns(m)) for m in pack([sample(0, False), sample(1, True)], budget)]
    for work in works:
        work.known["bootstrap_N"] = torch.where(cut_ends(work.micro), 0.7, 0.0)
    component = Recorder()
    prepare_whole_step(component, works, {}, {})  # type: ignore[arg-type]
    assert component.seen["bootstrap_S"].tolist() == pytest.approx([0.0, 0.7])
    assert "bootstrap_N" not in component.seen


def test_without_a_value_nothing_is_added() -> None:
    works = [Work(m, known_columns(m)) for m in pack([sample(0, True)], 100)]
    component = Recorder()
    prepare_whole_step(component, works, {}, {})  # type: ignore[arg-type]
    assert component.seen["bootstrap_S"].tolist() == [0.0]

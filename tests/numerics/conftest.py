"""Hand-checked vectors, a comparison with their tolerance, and groups made from rewards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from posttrain.types import (
    Completion,
    Draw,
    FinishReason,
    Group,
    Invalid,
    InvalidKind,
    Scored,
    StopReason,
    TokenSequence,
    Trajectory,
    Turn,
    Verdict,
)

VECTORS = {
    v["name"]: v
    for v in json.loads((Path(__file__).parent / "vectors.json").read_text())["vectors"]
}
DTYPES = {"float64": torch.float64, "float32": torch.float32}


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    # Tensors of a few numbers: on a busy machine waking threads costs more than the maths.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def vector() -> Callable[[str], dict[str, Any]]:
    """A vector by name: inputs, expected, tolerance, source."""
    return lambda name: VECTORS[name]


@pytest.fixture(params=list(DTYPES))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return DTYPES[request.param]


@pytest.fixture
def matches() -> Callable[..., None]:
    """Asserts equality within the tolerance, relative where |expected| > 1; float32 gets 1e-5."""

    def check(actual: Any, expected: Any, tolerance: float = 1e-6) -> None:
        actual = actual if isinstance(actual, torch.Tensor) else torch.tensor(actual)
        wanted = torch.tensor(expected, dtype=torch.float64)
        if actual.dtype == torch.float32:
            tolerance = max(tolerance, 1e-5)
        assert actual.shape == wanted.shape
        error = (actual.detach().double() - wanted).abs()
        assert bool((error <= tolerance * wanted.abs().clamp_min(1.0)).all()), (actual, expected)

    return check


def make_trajectory(
    draw_id: int,
    sample_index: int,
    verdict: Verdict | float | None,
    *,
    length: int = 1,
    stop_reason: StopReason = StopReason.TERMINATED,
) -> Trajectory:
    """A one-turn trajectory of `length` sampled tokens; a verdict of None is an Invalid."""
    if verdict is None:
        verdict = Invalid(InvalidKind.REWARD_ERROR, "the reward function raised")
    if isinstance(verdict, float):
        verdict = Scored(verdict)
    ids, logprobs = [7] * length, [-0.5] * length
    completion = Completion.build(ids, logprobs, [0] * length, FinishReason.EOS, "")
    sequence = TokenSequence.build(
        [1, *ids], [2] + [0] * length, [0.0, *logprobs], [-1] + [0] * length
    )
    turn = Turn(np.array([1], np.int32), completion)
    return Trajectory(
        draw_id, sample_index, sample_index, (turn,), (sequence,), verdict, stop_reason
    )


@pytest.fixture
def member() -> Callable[..., Trajectory]:
    return make_trajectory


@pytest.fixture
def group() -> Callable[..., Group]:
    """A group of a draw from verdicts or rewards, None for invalid; options as in `member`."""

    def build(
        draw_id: int,
        verdicts: Sequence[Verdict | float | None],
        *,
        task_id: str = "t",
        truncated: Sequence[int] = (),
        lengths: Sequence[int] | None = None,
    ) -> Group:
        members = tuple(
            make_trajectory(
                draw_id,
                i,
                verdict,
                length=lengths[i] if lengths else 1,
                stop_reason=StopReason.LENGTH if i in truncated else StopReason.TERMINATED,
            )
            for i, verdict in enumerate(verdicts)
        )
        return Group(Draw(draw_id, task_id, 0, draw_id), members)

    return build

"""What every sampler must do: the same request gives the same bits, whatever else is running."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from posttrain.protocols import Sampler
from posttrain.sampling.embedded import EmbeddedSampler
from posttrain.types import Completion, Int32, SamplingParams

MODELS = [("tiny", "bfloat16"), ("tiny", "float32"), ("sharp", "bfloat16"), ("sharp", "float32")]


@pytest.fixture(params=MODELS, ids="-".join)
def policy(request: pytest.FixtureRequest, read_policy: Callable[..., Any]) -> Any:
    return read_policy(*request.param)


@pytest.fixture
def requests(policy: Any) -> tuple[list[Int32], list[SamplingParams]]:
    """Equal prompts, prefixes of each other, strangers; lengths on both sides of the 64-key
    borders; every kind of params, one-token completions among them."""
    rng = np.random.default_rng(7)
    trunk = rng.integers(4, policy.vocab_size, 130).astype(np.int32)
    prompts = [trunk[:n] for n in (1, 60, 62, 63, 64, 65, 66, 70, 125, 127, 128, 130)]
    prompts += [trunk[:62], trunk[:62], rng.integers(4, policy.vocab_size, 5).astype(np.int32)]
    kinds = [
        SamplingParams(7, ignore_eos=True),
        SamplingParams(4, temperature=0.6),
        SamplingParams(1),
        SamplingParams(6, temperature=1.3, top_k=9, top_p=0.9, ignore_eos=True),
        SamplingParams(5, temperature=0),
        SamplingParams(7, stop=("e", "1")),
        SamplingParams(3, ignore_eos=True),
    ]
    return prompts, [kinds[i % len(kinds)] for i in range(len(prompts))]


def assert_same(actual: Completion, expected: Completion) -> None:
    assert actual.token_ids.tolist() == expected.token_ids.tolist()
    assert actual.sampler_logprobs.tolist() == expected.sampler_logprobs.tolist()
    assert (actual.text, actual.finish_reason) == (expected.text, expected.finish_reason)


def test_the_embedded_engine_is_a_sampler(read_policy: Callable[..., Any]) -> None:
    assert isinstance(EmbeddedSampler(read_policy("tiny"), max_batch=1), Sampler)


def test_a_completion_does_not_depend_on_its_neighbours(
    policy: Any, requests: Any, sample_all: Callable[..., list[Completion]]
) -> None:
    """Alone, in other batch sizes and orders: identical ids and bit-identical log-probs."""
    prompts, params = requests
    count = len(prompts)
    expected = sample_all(policy, prompts, params)
    for max_batch, order in [(1, range(count)), (3, range(count)), (16, range(count - 1, -1, -1))]:
        again = sample_all(policy, prompts, params, max_batch=max_batch, order=order)
        for one, other in zip(again, expected, strict=True):
            assert_same(one, other)
    assert {len(c) for c in expected} >= {1, 7}, "short and long ones ran together"


def test_a_completion_does_not_depend_on_when_others_arrive(policy: Any, requests: Any) -> None:
    """Requests that join while others decode, and rows that move when others leave."""
    prompts, params = requests

    async def staggered(gaps: list[int]) -> list[Completion]:
        sampler = EmbeddedSampler(policy, max_batch=4)
        tasks = []
        for i, gap in enumerate(gaps):
            task = sampler.generate(prompts[i], params[i], seed=100 + i)
            tasks.append(asyncio.create_task(task))
            for _ in range(gap):
                await asyncio.sleep(0)
        return list(await asyncio.gather(*tasks))

    count = len(prompts)
    together = asyncio.run(staggered([0] * count))
    for gaps in ([3] * count, [i % 5 for i in range(count)]):
        for one, other in zip(asyncio.run(staggered(gaps)), together, strict=True):
            assert_same(one, other)


def test_the_seed_decides_and_nothing_else_does(policy: Any) -> None:
    prompt = np.arange(4, 20, dtype=np.int32)
    params = SamplingParams(12, ignore_eos=True)

    async def draw(seeds: list[int]) -> list[Completion]:
        sampler = EmbeddedSampler(policy, max_batch=8)
        return list(
            await asyncio.gather(*(sampler.generate(prompt, params, seed) for seed in seeds))
        )

    first, second, other = asyncio.run(draw([1, 1, 2]))
    assert_same(first, second)
    assert first.token_ids.tolist() != other.token_ids.tolist()


def test_a_longer_limit_only_continues_what_a_shorter_one_gave(policy: Any) -> None:
    prompt = np.arange(4, 62, dtype=np.int32)

    async def draw() -> list[Completion]:
        sampler = EmbeddedSampler(policy, max_batch=8)
        return list(
            await asyncio.gather(
                *(
                    sampler.generate(prompt, SamplingParams(n, ignore_eos=True), 3)
                    for n in (1, 6, 12)
                )
            )
        )

    *shorter, longest = asyncio.run(draw())
    for done in shorter:
        assert done.token_ids.tolist() == longest.token_ids[: len(done)].tolist()
        assert done.sampler_logprobs.tolist() == longest.sampler_logprobs[: len(done)].tolist()


def test_a_cancelled_caller_frees_its_row_and_changes_nobody_elses_result(
    policy: Any, requests: Any, sample_all: Callable[..., list[Completion]]
) -> None:
    prompts, params = requests
    expected = sample_all(policy, prompts, params)

    async def with_cancellations(cancelled: set[int]) -> list[Any]:
        sampler = EmbeddedSampler(policy, max_batch=5)
        tasks = [
            asyncio.create_task(sampler.generate(prompts[i], params[i], seed=100 + i))
            for i in range(len(prompts))
        ]
        for _ in range(4):
            await asyncio.sleep(0)
        for i in cancelled:
            tasks[i].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)
        # Every row is free again: a full batch of new requests is served.
        again = await asyncio.gather(
            *(sampler.generate(prompts[i], params[i], seed=100 + i) for i in range(5))
        )
        for one, other in zip(again, expected, strict=False):
            assert_same(one, other)
        return results

    cancelled = {0, 3, 8, 13}  # running ones and waiting ones
    for i, result in enumerate(asyncio.run(with_cancellations(cancelled))):
        if isinstance(result, asyncio.CancelledError):
            assert i in cancelled
        else:
            assert_same(result, expected[i])


def test_log_probs_are_finite_and_those_of_a_distribution(
    policy: Any, requests: Any, sample_all: Callable[..., list[Completion]]
) -> None:
    prompts, params = requests
    for done, how in zip(sample_all(policy, prompts, params), params, strict=True):
        assert np.isfinite(done.sampler_logprobs).all()
        assert (done.sampler_logprobs <= 1e-6).all()
        assert 1 <= len(done) <= how.max_tokens
        assert done.policy_versions.tolist() == [0] * len(done)
        if how.temperature == 0:
            assert done.sampler_logprobs.tolist() == [0.0] * len(done)

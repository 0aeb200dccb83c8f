"""Any schedule of requests, cancellations, pauses and new weights: no token is wrong, no block is
lost."""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrain.sampling import embedded
from posttrain.sampling.embedded import EmbeddedSampler
from posttrain.training.policy import load_policy
from posttrain.types import Completion, FinishReason, Int32, SamplingParams

KV_TOKENS = 160
LENGTHS = (1, 15, 16, 17, 33, 64, 70)  # prefixes of each other, on both sides of block borders
LIMITS = (1, 4, 30)
ACTIONS = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, len(LENGTHS) - 1), st.integers(0, 2)),
    st.tuples(st.just("wait"), st.integers(1, 12), st.just(0)),
    st.tuples(st.just("cancel"), st.integers(0, 20), st.just(0)),
    st.tuples(st.sampled_from(["pause", "resume", "load", "abort"]), st.just(0), st.just(0)),
)


class Bench:
    """One model with two sets of weights, and what a fresh engine samples from each."""

    def __init__(self, folder: Path) -> None:
        self.policy = load_policy(folder, dtype="bfloat16")
        first = [p.detach().clone() for p in self.policy.model.parameters()]
        generator = torch.Generator().manual_seed(5)
        noise = [torch.randn(p.shape, generator=generator) for p in first]
        second = [p + (0.05 * n).to(p.dtype) for p, n in zip(first, noise, strict=True)]
        self.weights = (first, second)
        vocab = self.policy.vocab_size
        self.trunk = np.random.default_rng(3).integers(4, vocab, max(LENGTHS)).astype(np.int32)
        self.alone = cache(self._alone)

    def use(self, version: int) -> None:
        with torch.no_grad():
            for parameter, value in zip(
                self.policy.model.parameters(), self.weights[version % 2], strict=True
            ):
                parameter.copy_(value)

    def prompt(self, which: int) -> Int32:
        return self.trunk[: LENGTHS[which]]

    def _alone(self, which: int, limit: int, seed: int, odd: int) -> Completion:
        """The slow oracle: nobody else, nothing cached, these weights."""
        self.use(odd)
        sampler = EmbeddedSampler(self.policy, max_batch=1, version=odd)
        params = SamplingParams(LIMITS[limit], ignore_eos=True)
        return asyncio.run(sampler.generate(self.prompt(which), params, seed))


@pytest.fixture(scope="module")
def bench(sharp_folder: Path) -> Bench:
    return Bench(sharp_folder)


class Schedule:
    """Some actions on an engine, and what became of each request: (prompt, limit, seed, result)."""

    def __init__(self, bench: Bench, kv_tokens: int) -> None:
        bench.use(0)
        self.bench, self.version = bench, 0
        self.sampler = EmbeddedSampler(bench.policy, max_batch=4, kv_tokens=kv_tokens)
        self.calls: list[tuple[int, int, int, asyncio.Task[Completion]]] = []

    async def play(self, actions: list[tuple[str, int, int]]) -> list[tuple[int, int, int, Any]]:
        for what, a, b in actions:
            await self._do(what, a, b)
        await self.sampler.resume()
        tasks = [task for *_, task in self.calls]
        done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), timeout=60)
        return [(*call[:3], result) for call, result in zip(self.calls, done, strict=True)]

    async def _do(self, what: str, a: int, b: int) -> None:
        match what:
            case "ask":
                seed = len(self.calls) % 3
                params = SamplingParams(LIMITS[b], ignore_eos=True)
                call = self.sampler.generate(self.bench.prompt(a), params, seed)
                self.calls.append((a, b, seed, asyncio.create_task(call)))
            case "wait":
                for _ in range(a):
                    await asyncio.sleep(0)
            case "cancel" if self.calls:
                self.calls[a % len(self.calls)][3].cancel()
            case "load":
                self.version += 1
                self.bench.use(self.version)
                await self.sampler.load_weights(self.version)
            case "pause":
                await self.sampler.pause()
            case "resume":
                await self.sampler.resume()
            case "abort":
                await self.sampler.abort()


def check(bench: Bench, request: tuple[int, int, int, Any]) -> None:
    *asked, result = request
    if isinstance(result, asyncio.CancelledError):
        return
    assert isinstance(result, Completion), result
    versions = result.policy_versions.tolist()
    assert versions == sorted(versions)
    if result.finish_reason is not FinishReason.ABORT:
        assert len(result) == LIMITS[asked[1]]
    if not versions or versions[0] != versions[-1]:
        return
    expected = bench.alone(*asked, versions[0] % 2)
    assert result.token_ids.tolist() == expected.token_ids[: len(result)].tolist()
    assert result.sampler_logprobs.tolist() == expected.sampler_logprobs[: len(result)].tolist()


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(ACTIONS, min_size=4, max_size=24), st.sampled_from([112, KV_TOKENS, 2000]))
def test_any_schedule_gives_what_a_fresh_engine_gives_and_every_block_back(
    bench: Bench, actions: list[tuple[str, int, int]], kv_tokens: int
) -> None:
    schedule = Schedule(bench, kv_tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedded, "PREFILL_ROWS", 16)
        requests = asyncio.run(schedule.play(actions))
    store = schedule.sampler._store
    assert not any(store._uses) and store.num_available == store.num_blocks
    for request in requests:
        check(bench, request)


def test_the_schedules_meet_what_they_are_there_for(bench: Bench) -> None:
    """Preemption, eviction, cache hits and mixed versions: else the property would say little."""
    asks = [("ask", which, 2) for which in (3, 4, 5, 6, 4, 5, 2, 1)]
    schedule = Schedule(bench, 112)
    requests = asyncio.run(
        schedule.play([*asks, ("wait", 12, 0), ("load", 0, 0), ("wait", 20, 0), *asks])
    )
    stats = schedule.sampler.stats()
    assert stats["sampler/preemptions"] > 0 and stats["sampler/cached_tokens"] > 0
    assert stats["sampler/waiting_max"] >= 4
    assert {v for *_, done in requests for v in done.policy_versions.tolist()} == {0, 1}
    for request in requests:
        check(bench, request)

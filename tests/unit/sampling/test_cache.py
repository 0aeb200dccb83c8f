"""Cached, evicted, preempted, paused, aborted: a completion is the one a fresh engine gives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from posttrain.algo.logprobs import token_logprobs
from posttrain.data.prefix_tree import build_prefix_tree
from posttrain.errors import EngineError
from posttrain.kernels.logits import logit_stats
from posttrain.sampling import embedded
from posttrain.sampling.embedded import EmbeddedSampler
from posttrain.training.paged import BLOCK
from posttrain.training.policy import load_policy
from posttrain.types import Completion, FinishReason, Int32, SamplingParams

DTYPES = ["bfloat16", "float32"]


@pytest.fixture(params=DTYPES)
def policy(request: pytest.FixtureRequest, read_policy: Callable[..., Any]) -> Any:
    return read_policy("sharp", request.param)


@pytest.fixture(params=DTYPES)
def own_policy(request: pytest.FixtureRequest, sharp_folder: Path) -> Any:
    """One whose weights may be changed."""
    return load_policy(sharp_folder, dtype=request.param)


def prompt_of(policy: Any, length: int, seed: int = 0) -> Int32:
    return np.random.default_rng(seed).integers(4, policy.vocab_size, length).astype(np.int32)


def alone(policy: Any, prompt: Int32, params: SamplingParams, seed: int) -> Completion:
    """The slow oracle: an engine of its own, nothing cached, nobody else."""
    return asyncio.run(EmbeddedSampler(policy, max_batch=1).generate(prompt, params, seed))


def assert_same(found: Completion, expected: Completion) -> None:
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    if found.sampler_logprobs.tolist() != expected.sampler_logprobs.tolist():
        np.testing.assert_allclose(
            found.sampler_logprobs, expected.sampler_logprobs, atol=3e-6, rtol=0
        )


def exact(found: Completion, expected: Completion) -> bool:
    return found.sampler_logprobs.tolist() == expected.sampler_logprobs.tolist()


def nothing_is_held(sampler: EmbeddedSampler) -> bool:
    return sampler._store.num_in_use == 0


def test_later_turns_and_repeated_prompts_read_the_cache_and_change_nothing(policy: Any) -> None:
    sampler = EmbeddedSampler(policy, max_batch=4)
    params = SamplingParams(20, ignore_eos=True)
    prompt = prompt_of(policy, 50)

    async def turns() -> list[tuple[Int32, Completion]]:
        said, ids = [], prompt
        for turn in range(3):
            done = await sampler.generate(ids, params, turn)
            said.append((ids, done))
            ids = np.concatenate([ids, done.token_ids, prompt_of(policy, 9, seed=turn + 1)])
        said.append((prompt, await sampler.generate(prompt, params, 0)))
        return said

    said = asyncio.run(turns())
    stats = sampler.stats()
    assert stats["sampler/cached_tokens"] == 64 + 96 + 48
    computed = sum(len(ids) for ids, _ in said) - stats["sampler/cached_tokens"]
    assert stats["sampler/prefill_tokens"] == computed
    for turn, (ids, done) in enumerate(said):
        expected = alone(policy, ids, params, turn % 3)
        assert_same(done, expected)
        if policy.dtype == torch.bfloat16:
            assert exact(done, expected)
    assert nothing_is_held(sampler)


@pytest.mark.parametrize("kv_tokens", [96, 144, 1000])
def test_little_room_makes_requests_wait_or_begin_again_and_changes_no_result(
    kv_tokens: int, policy: Any
) -> None:
    """Eviction in the middle of a group, back-pressure, preemption."""
    sampler = EmbeddedSampler(policy, max_batch=6, kv_tokens=kv_tokens)
    prompts = [prompt_of(policy, n, seed=n) for n in (30, 30, 30, 17, 16, 1, 40, 33)]
    params = [SamplingParams(40 if i % 2 else 5, ignore_eos=True) for i in range(len(prompts))]

    async def all_of_them() -> list[Completion]:
        calls = (
            sampler.generate(p, s, i) for i, (p, s) in enumerate(zip(prompts, params, strict=True))
        )
        return await asyncio.gather(*calls)

    done = asyncio.run(all_of_them())
    stats = sampler.stats()
    assert stats["sampler/kv_frac"] <= 1
    assert (stats["sampler/preemptions"] > 0) == (kv_tokens < 1000)
    for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        assert_same(done[i], alone(policy, prompt, param, i))
    assert nothing_is_held(sampler)


def test_what_can_never_fit_is_refused_with_the_setting_to_change(policy: Any) -> None:
    sampler = EmbeddedSampler(policy, max_batch=2, kv_tokens=64)
    with pytest.raises(EngineError, match=r"sampler\.kv_tokens 64"):
        asyncio.run(sampler.generate(prompt_of(policy, 50), SamplingParams(20), 0))


def moved(policy: Any) -> None:
    """Other weights, as a learner's update gives them."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.add_(0.05 * noise)


@pytest.mark.parametrize("version", [1, 0])
def test_new_weights_never_read_old_keys(own_policy: Any, version: int) -> None:
    """Not even where they come under the old number."""
    policy = own_policy
    sampler = EmbeddedSampler(policy, max_batch=4)
    prompt, params = prompt_of(policy, 70), SamplingParams(20, ignore_eos=True)

    async def scenario() -> Completion:
        await sampler.generate(prompt, params, 0)
        moved(policy)
        await sampler.load_weights(version)
        assert sampler._store.num_kept == 0
        return await sampler.generate(prompt, params, 0)

    before = alone(policy, prompt, params, 0)
    after = asyncio.run(scenario())
    assert sampler.stats()["sampler/cached_tokens"] == 0
    assert_same(after, alone(policy, prompt, params, 0))
    assert after.sampler_logprobs.tolist() != before.sampler_logprobs.tolist()


@pytest.mark.parametrize("version", [1, 0])
def test_weights_that_change_in_flight_leave_their_versions_and_no_keys_behind(
    own_policy: Any, version: int
) -> None:
    policy = own_policy
    sampler = EmbeddedSampler(policy, max_batch=4)
    prompt, params = prompt_of(policy, 70), SamplingParams(40, ignore_eos=True)

    async def scenario() -> tuple[Completion, Completion]:
        going = asyncio.create_task(sampler.generate(prompt, params, 0))
        while sampler._counts.sampled < 10:
            await asyncio.sleep(0)
        moved(policy)
        await sampler.load_weights(version)
        crossing = await going
        ids = np.concatenate([prompt, crossing.token_ids])
        return crossing, await sampler.generate(ids, params, 1)

    crossing, later = asyncio.run(scenario())
    versions = crossing.policy_versions.tolist()
    assert versions == [0] * 10 + [version] * 30
    assert sampler.stats()["sampler/cached_tokens"] == 0, "its keys are of two versions"
    ids = np.concatenate([prompt, crossing.token_ids])
    assert_same(later, alone(policy, ids, params, 1))


def test_a_pause_computes_nothing_and_loses_nothing(policy: Any) -> None:
    sampler = EmbeddedSampler(policy, max_batch=4)
    prompt, params = prompt_of(policy, 20), SamplingParams(15, ignore_eos=True)

    async def scenario() -> tuple[int, int, Completion, Completion]:
        first = asyncio.create_task(sampler.generate(prompt, params, 0))
        while sampler._counts.sampled < 4:
            await asyncio.sleep(0)
        await sampler.pause()
        second = asyncio.create_task(sampler.generate(prompt, params, 1))
        at = sampler._counts.sampled
        for _ in range(50):
            await asyncio.sleep(0)
        still = sampler._counts.sampled
        await sampler.resume()
        return at, still, await first, await second

    at, still, first, second = asyncio.run(scenario())
    assert at == still < 15
    assert_same(first, alone(policy, prompt, params, 0))
    assert_same(second, alone(policy, prompt, params, 1))


def test_a_long_prompt_is_computed_in_pieces_between_the_tokens_of_others(
    policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "PREFILL_ROWS", 16)
    sampler = EmbeddedSampler(policy, max_batch=4)
    params = SamplingParams(30, ignore_eos=True)
    short, long = prompt_of(policy, 5), prompt_of(policy, 150, seed=1)

    async def scenario() -> tuple[int, Completion, list[Completion]]:
        first = asyncio.create_task(sampler.generate(short, params, 0))
        while sampler._counts.sampled < 2:
            await asyncio.sleep(0)
        siblings = [asyncio.create_task(sampler.generate(long, params, i)) for i in (1, 2)]
        while sampler._counts.prefilled < 5 + 150:
            await asyncio.sleep(0)
        meanwhile = sampler._counts.sampled
        return meanwhile, await first, list(await asyncio.gather(*siblings))

    meanwhile, first, siblings = asyncio.run(scenario())
    assert meanwhile >= 2 + 150 // 16
    assert_same(first, alone(policy, short, params, 0))
    for i, sibling in enumerate(siblings, start=1):
        assert_same(sibling, alone(policy, long, params, i))


def test_a_prompt_that_was_half_computed_under_old_weights_begins_again(
    own_policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first token would else come from an old state under a new output head."""
    policy = own_policy
    monkeypatch.setattr(embedded, "PREFILL_ROWS", 16)
    sampler = EmbeddedSampler(policy, max_batch=4)
    prompts = [prompt_of(policy, n, seed=n) for n in (10, 100)]
    params = SamplingParams(5, ignore_eos=True)

    async def scenario() -> list[Completion]:
        calls = [asyncio.create_task(sampler.generate(p, params, i)) for i, p in enumerate(prompts)]
        while sampler._counts.prefilled < 30:
            await asyncio.sleep(0)
        moved(policy)
        await sampler.load_weights(1)
        return await asyncio.gather(*calls)

    for i, done in enumerate(asyncio.run(scenario())):
        assert done.policy_versions.tolist() == [1] * 5
        assert_same(done, alone(policy, prompts[i], params, i))
    assert nothing_is_held(sampler)


def test_a_prompt_that_nobody_waits_for_any_more_is_not_computed_to_its_end(
    policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "PREFILL_ROWS", 16)
    sampler = EmbeddedSampler(policy, max_batch=4)

    async def scenario() -> None:
        call = asyncio.create_task(sampler.generate(prompt_of(policy, 200), SamplingParams(5), 0))
        while sampler._counts.prefilled < 16:
            await asyncio.sleep(0)
        call.cancel()
        for _ in range(50):
            await asyncio.sleep(0)

    asyncio.run(scenario())
    assert sampler.stats()["sampler/prefill_tokens"] <= 48
    assert nothing_is_held(sampler)


def test_siblings_need_room_for_their_own_ends_only(policy: Any) -> None:
    """Ten blocks of prompt are there once: four siblings run where there are twenty."""
    sampler = EmbeddedSampler(policy, max_batch=8, kv_tokens=20 * BLOCK)
    prompt, params = prompt_of(policy, 10 * BLOCK), SamplingParams(5, ignore_eos=True)

    async def group(start: int) -> int:
        calls = [asyncio.create_task(sampler.generate(prompt, params, start + i)) for i in range(4)]
        most = 0
        while not all(call.done() for call in calls):
            await asyncio.sleep(0)
            most = max(most, len(sampler._running))
        return most

    async def two_groups() -> list[int]:
        return await asyncio.gather(group(0), group(4))

    assert asyncio.run(group(0)) == 4
    assert asyncio.run(two_groups()) == [8, 8]


async def _cancel(tasks: Sequence[asyncio.Task[Any]], sampler: EmbeddedSampler) -> None:
    tasks[1].cancel()


async def _abort(tasks: Sequence[asyncio.Task[Any]], sampler: EmbeddedSampler) -> None:
    await sampler.abort()


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 12])
@pytest.mark.parametrize("how", [_cancel, _abort])
def test_owners_may_leave_at_any_moment(
    how: Callable[..., Awaitable[None]],
    steps: int,
    policy: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While they wait, in the middle of a prefill, and while they run: blocks come back."""
    monkeypatch.setattr(embedded, "PREFILL_ROWS", 16)
    sampler = EmbeddedSampler(policy, max_batch=3, kv_tokens=200)
    prompts = [prompt_of(policy, n, seed=n) for n in (50, 50, 60, 20)]
    params = SamplingParams(8, ignore_eos=True)

    async def scenario() -> list[Any]:
        tasks = [asyncio.create_task(sampler.generate(p, params, i)) for i, p in enumerate(prompts)]
        for _ in range(steps):
            await asyncio.sleep(0)
        await how(tasks, sampler)
        done = await asyncio.gather(*tasks, return_exceptions=True)
        return [*done, await sampler.generate(prompts[0], params, 9)]

    *done, later = asyncio.run(scenario())
    assert_same(later, alone(policy, prompts[0], params, 9))
    for i, completion in enumerate(done):
        if isinstance(completion, asyncio.CancelledError):
            assert how is _cancel and i == 1
        elif completion.finish_reason is not FinishReason.ABORT:
            assert_same(completion, alone(policy, prompts[i], params, i))
    assert nothing_is_held(sampler)


def test_siblings_share_whole_blocks_and_each_has_its_own_end(policy: Any) -> None:
    sampler = EmbeddedSampler(policy, max_batch=8)
    prompt = prompt_of(policy, 2 * BLOCK + 5)

    async def group() -> int:
        params = SamplingParams(3, ignore_eos=True)
        tasks = [asyncio.create_task(sampler.generate(prompt, params, i)) for i in range(8)]
        while not sampler._running:
            await asyncio.sleep(0)
        held = sampler._store.num_in_use
        await asyncio.gather(*tasks)
        return held

    assert asyncio.run(group()) == 2 + 8
    assert sampler.stats()["sampler/prefill_tokens"] == len(prompt)


def test_sampled_log_probs_are_those_of_the_learners_pass(read_policy: Callable[..., Any]) -> None:
    """Packed, shared-prefix and teacher-forced against cached, preempted and evicted: 0."""
    policy = read_policy("sharp", "bfloat16")
    sampler = EmbeddedSampler(policy, max_batch=6, kv_tokens=80)
    prompts = [prompt_of(policy, n, seed=n % 2) for n in (33, 33, 34, 34, 16, 1)]

    async def group() -> list[Completion]:
        params = SamplingParams(25, ignore_eos=True)
        return await asyncio.gather(
            *(sampler.generate(p, params, i) for i, p in enumerate(prompts))
        )

    done = asyncio.run(group())
    assert sampler.stats()["sampler/preemptions"] > 0
    whole = [np.concatenate([p, c.token_ids]) for p, c in zip(prompts, done, strict=True)]
    tree = build_prefix_tree(whole)
    with torch.no_grad():
        hidden = policy.tree_hidden(tree)
        for path, prompt, completion in zip(tree.paths, prompts, done, strict=True):
            predict = torch.from_numpy(path[len(prompt) - 1 : -1])
            labels = torch.from_numpy(completion.token_ids.astype(np.int64))
            found = _logprobs(policy, hidden[predict], labels)
            assert found.tolist() == completion.sampler_logprobs.tolist()


def test_the_fused_attention_samples_too_and_promises_less(sharp_folder: Path) -> None:
    """`model.attention = "sdpa"`: the same distribution, rounded in another way."""
    policy = load_policy(sharp_folder, dtype="bfloat16", attention_kind="sdpa")
    sampler = EmbeddedSampler(policy, max_batch=4)
    prompt, params = prompt_of(policy, 40), SamplingParams(20, ignore_eos=True)

    async def group() -> list[Completion]:
        return await asyncio.gather(*(sampler.generate(prompt, params, i) for i in range(4)))

    done = asyncio.run(group())
    tree = build_prefix_tree([np.concatenate([prompt, c.token_ids]) for c in done])
    with torch.no_grad():
        hidden = policy.tree_hidden(tree)
        for path, completion in zip(tree.paths, done, strict=True):
            labels = torch.from_numpy(completion.token_ids.astype(np.int64))
            found = _logprobs(policy, hidden[torch.from_numpy(path[39:-1])], labels)
            mismatch = (found - torch.from_numpy(completion.sampler_logprobs)).abs()
            assert float(mismatch.mean()) < 0.05


def _logprobs(policy: Any, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if policy.kernel_logits:
        return logit_stats(policy.raw_logits(hidden), labels, 1.0)[0]
    return token_logprobs(policy.logits(hidden), labels)

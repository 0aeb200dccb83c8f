"""When a completion ends, what its text is, and who learns of a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from posttrain.errors import EngineError
from posttrain.sampling.embedded import EmbeddedSampler
from posttrain.types import Completion, FinishReason, SamplingParams

ABCDEF = list("abcdef")


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


# --- the end of a turn ----------------------------------------------------------------------------


@pytest.mark.parametrize("eos", [(3,), (2, 3, 5), (0, 3)])
def test_any_end_token_ends_the_turn_and_stays_in_the_ids_but_not_in_the_text(
    eos: tuple[int, ...], table: Any, complete: Callable[..., Completion]
) -> None:
    done = complete(table(ABCDEF, eos=eos), [0])
    first = min(e for e in eos if e > 0)
    assert done.token_ids.tolist() == list(range(1, first + 1))
    assert done.text == "abcdef"[1:first]
    assert done.finish_reason is FinishReason.EOS


def test_an_end_token_that_is_also_the_padding_token_ends_the_turn_and_is_kept(
    table: Any, complete: Callable[..., Completion]
) -> None:
    """a23: nothing is masked by id, so a policy can learn to stop."""
    done = complete(table(["</s>", *"abc"], eos=(0,)), [2])
    assert done.token_ids.tolist() == [3, 0] and done.text == "c"


def test_a_prompt_may_hold_end_tokens(table: Any, complete: Callable[..., Completion]) -> None:
    assert complete(table(ABCDEF, eos=(3,)), [3, 3, 0]).token_ids.tolist() == [1, 2, 3]


def test_ignored_end_tokens_are_text_like_any_other(
    table: Any, complete: Callable[..., Completion]
) -> None:
    done = complete(table(ABCDEF, eos=(3,)), [0], ignore_eos=True, max_tokens=5)
    assert (done.text, done.finish_reason) == ("bcdef", FinishReason.LENGTH)


def test_an_end_token_as_the_only_token_gives_an_empty_text(
    table: Any, complete: Callable[..., Completion]
) -> None:
    done = complete(table(ABCDEF, eos=(1,)), [0])
    assert (len(done), done.text, done.finish_reason) == (1, "", FinishReason.EOS)


# --- stop strings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pieces", "stop", "num_tokens", "text"),
    [
        (["?", "so EN", "D of", "it"], ("END",), 2, "so "),  # spans a border
        (["?", "E", "N", "D", "x"], ("END",), 3, ""),  # one letter a token
        (["?", "END", "x"], ("END",), 1, ""),  # at the first token
        (["?", "a", "b;c", "d"], ("c", "b;"), 2, "a"),  # two in one token: the earlier one
        (["?", "ab", "cd", "e"], ("bcde", "cd"), 2, "ab"),  # the one that is complete first
        (["?", "xyx", "y!"], ("y!", "yx"), 1, "x"),
        (["?", "aEN", "aEND"], ("END",), 2, "aENa"),  # a false start
        (["?", "\u00e9".encode()[:1], "\u00e9".encode()[1:], "x"], ("\u00e9",), 2, ""),
        (["?", "\n", "\nx"], ("\n\n",), 2, ""),
    ],
)
def test_a_stop_string_cuts_the_text_and_keeps_the_ids(
    pieces: list[Any],
    stop: tuple[str, ...],
    num_tokens: int,
    text: str,
    table: Any,
    complete: Callable[..., Completion],
) -> None:
    """i02: the matched string and what follows it are not text; the ids stay as sampled."""
    done = complete(table(pieces), [0], stop=stop)
    assert done.finish_reason is FinishReason.STOP_STRING
    assert (len(done), done.text) == (num_tokens, text)
    assert done.token_ids.tolist() == list(range(1, num_tokens + 1))


def test_a_stop_string_in_the_prompt_stops_nothing(
    table: Any, complete: Callable[..., Completion]
) -> None:
    done = complete(table(["END", "EN", "x", "D", "y"]), [0], stop=("END",), max_tokens=4)
    assert done.finish_reason is FinishReason.LENGTH


def test_an_end_token_wins_over_a_stop_string_it_completes(
    table: Any, complete: Callable[..., Completion]
) -> None:
    done = complete(table(["?", "a", "</s>"], eos=(2,)), [0], stop=("</s>",))
    assert (done.finish_reason, done.text) == (FinishReason.EOS, "a")


# --- length and context ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt_length", "max_tokens", "num_tokens", "reason"),
    [
        (10, 5, 5, FinishReason.LENGTH),
        (10, 10, 10, FinishReason.LENGTH),  # exactly the room there is
        (10, 11, 10, FinishReason.CONTEXT),
        (19, 5, 1, FinishReason.CONTEXT),
        (19, 1, 1, FinishReason.LENGTH),
    ],
)
def test_length_and_a_full_context_are_told_apart(
    prompt_length: int,
    max_tokens: int,
    num_tokens: int,
    reason: FinishReason,
    table: Any,
    complete: Callable[..., Completion],
) -> None:
    done = complete(table(ABCDEF, max_context=20), [0] * prompt_length, max_tokens=max_tokens)
    assert (len(done), done.finish_reason) == (num_tokens, reason)


@pytest.mark.parametrize(
    ("prompt", "fact"),
    [
        ([], "a prompt of 0 tokens"),
        ([0] * 20, "a prompt of 20 tokens cannot be continued in a context of 20"),
        ([0] * 21, "a prompt of 21 tokens"),
        ([0, 6], "outside the vocabulary of 6"),
        ([-1], "span -1..-1"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_and_disturbs_nobody(
    prompt: list[int], fact: str, table: Any
) -> None:
    sampler = EmbeddedSampler(table(ABCDEF, eos=(5,), max_context=20), max_batch=2)
    params = SamplingParams(9)

    async def both() -> list[Any]:
        return await asyncio.gather(
            sampler.generate(ids(1), params, 0),
            sampler.generate(np.array(prompt, np.int32), params, 0),
            return_exceptions=True,
        )

    good, bad = asyncio.run(both())
    assert good.text == "cde"
    assert isinstance(bad, EngineError) and fact in str(bad)


# --- text -----------------------------------------------------------------------------------------

DUCK = "🦆".encode()


def test_characters_of_several_tokens_are_decoded_whole(
    table: Any, complete: Callable[..., Completion]
) -> None:
    """b10: no replacement mark where bytes cross token borders."""
    pieces = ["?", b"a" + DUCK[:1], DUCK[1:2], DUCK[2:], "字", "."]
    assert complete(table(pieces), [0], max_tokens=5).text == "a🦆字."


@pytest.mark.parametrize("cut", [1, 2])
def test_a_character_that_the_limit_cuts_leaves_one_replacement_mark(
    cut: int, table: Any, complete: Callable[..., Completion]
) -> None:
    """b10"""
    pieces = ["?", b"a" + DUCK[:1], DUCK[1:2], DUCK[2:]]
    assert complete(table(pieces), [0], max_tokens=cut).text == "a\N{REPLACEMENT CHARACTER}"


# --- many at once ---------------------------------------------------------------------------------


def test_no_more_than_max_batch_decode_together_and_all_are_served(table: Any) -> None:
    policy = table(ABCDEF, eos=(5,))
    sampler = EmbeddedSampler(policy, max_batch=3)

    async def ten() -> list[Completion]:
        params = SamplingParams(9)
        return await asyncio.gather(*(sampler.generate(ids(i % 5), params, i) for i in range(10)))

    assert [c.text for c in asyncio.run(ten())] == ["bcde", "cde", "de", "e", ""] * 2
    assert max(policy.rows_at_once) <= 3


def test_abort_ends_what_is_in_flight_with_what_it_has_and_nothing_later(table: Any) -> None:
    policy = table(ABCDEF)
    sampler = EmbeddedSampler(policy, max_batch=2)

    async def scenario() -> tuple[list[Completion], Completion]:
        params = SamplingParams(60)
        going = [asyncio.create_task(sampler.generate(ids(i), params, i)) for i in range(3)]
        while len(policy.rows_at_once) < 4:
            await asyncio.sleep(0)
        await sampler.abort()
        ended = await asyncio.gather(*going)
        return ended, await sampler.generate(ids(0), SamplingParams(3), 0)

    ended, later = asyncio.run(scenario())
    assert {c.finish_reason for c in ended} == {FinishReason.ABORT}
    assert [len(c) for c in ended] == [len(ended[0])] * 2 + [0], "the third was still waiting"
    assert ended[0].text.startswith("bcd") and ended[2].text == ""
    assert (later.text, later.finish_reason) == ("bcd", FinishReason.LENGTH)


@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_an_engine_error_reaches_every_owner_and_the_engine_goes_on(
    fails_at: int, table: Any
) -> None:
    """At the prefill of the first, at a decode, and while others wait for a row: nobody hangs."""
    policy = table(ABCDEF)
    policy.fails_at = fails_at
    sampler = EmbeddedSampler(policy, max_batch=2)

    async def scenario() -> tuple[list[Any], Completion]:
        params = SamplingParams(9)
        failed = await asyncio.wait_for(
            asyncio.gather(
                *(sampler.generate(ids(i), params, i) for i in range(4)), return_exceptions=True
            ),
            timeout=20,
        )
        policy.fails_at = None
        return failed, await sampler.generate(ids(0), SamplingParams(3), 0)

    failed, later = asyncio.run(scenario())
    for error in failed:
        assert isinstance(error, EngineError) and "RuntimeError: the kernel failed" in str(error)
        assert isinstance(error.__cause__, RuntimeError)
    assert later.text == "bcd"


def test_tokens_carry_the_version_of_the_weights_that_sampled_them(table: Any) -> None:
    policy = table(ABCDEF)
    sampler = EmbeddedSampler(policy, max_batch=2, version=4)

    async def scenario() -> tuple[Completion, Completion]:
        task = asyncio.create_task(sampler.generate(ids(0), SamplingParams(8), 0))
        while len(policy.rows_at_once) < 3:
            await asyncio.sleep(0)
        await sampler.load_weights(5)
        return await task, await sampler.generate(ids(0), SamplingParams(2), 0)

    crossing, after = asyncio.run(scenario())
    versions = crossing.policy_versions.tolist()
    assert versions == sorted(versions) and set(versions) == {4, 5} and versions.count(4) >= 2
    assert after.policy_versions.tolist() == [5, 5]


def test_an_engine_serves_one_event_loop_after_another(table: Any) -> None:
    sampler = EmbeddedSampler(table(ABCDEF), max_batch=2)
    for _ in range(2):
        done = asyncio.run(sampler.generate(ids(0), SamplingParams(2), 0))
        assert done.text == "bc"


def test_stats_count_tokens_since_the_last_call_and_shared_prompts_once(table: Any) -> None:
    sampler = EmbeddedSampler(table(ABCDEF), max_batch=8)

    async def siblings() -> None:
        prompt = ids(0, 1, 2)
        await asyncio.gather(*(sampler.generate(prompt, SamplingParams(4), i) for i in range(5)))

    asyncio.run(siblings())
    stats = sampler.stats()
    assert (stats["sampler/tokens"], stats["sampler/prefill_tokens"]) == (20, 3)
    assert sampler.stats()["sampler/tokens"] == 0

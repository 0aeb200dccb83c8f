"""Prompts of an exact length, and runs in which no sequence ends early."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from posttrain.benchmarks.our_steps import OurSteps, StepSizes, write_endless_model
from posttrain.benchmarks.prompts import exact_texts
from posttrain.errors import BenchmarkError, ConfigError
from posttrain.training.models import resolve_model
from posttrain.training.policy import load_policy


@pytest.fixture
def folder() -> Path:
    return resolve_model("tiny-char")


def test_texts_have_exactly_as_many_tokens_and_are_the_same_every_time(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = exact_texts(tokenizer, count=5, tokens=9)
    assert [len(tokenizer.encode(t, add_special_tokens=False)) for t in texts] == [9] * 5
    assert len(set(texts)) == 5
    assert exact_texts(tokenizer, count=5, tokens=9) == texts


def test_a_tokenizer_without_such_texts_is_refused(folder: Path) -> None:
    class Splitting:
        """Every text is one token longer than the words in it."""

        def __init__(self) -> None:
            self._real = AutoTokenizer.from_pretrained(folder)
            self.decode, self.__len__ = self._real.decode, self._real.__len__

        def __len__(self) -> int:
            return len(self._real)

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [0, *self._real.encode(text, add_special_tokens=add_special_tokens)]

    with pytest.raises(ConfigError, match="0 texts of exactly 3 tokens"):
        exact_texts(Splitting(), count=1, tokens=3)


def test_an_endless_model_has_the_same_weights_and_no_end(folder: Path, tmp_path: Path) -> None:
    write_endless_model(folder, tmp_path / "model")
    ours, theirs = (load_policy(f, dtype="float32") for f in (tmp_path / "model", folder))
    assert (ours.eos_token_ids, theirs.eos_token_ids) == ((), (2,))
    text = [{"role": "user", "content": "abc"}]
    assert ours.tokenizer.apply_chat_template(text, tokenize=False) == "abc"
    for a, b in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert a.equal(b)


def test_every_step_samples_all_its_tokens_and_what_is_between_is_in_no_step(
    folder: Path, tmp_path: Path
) -> None:
    sizes = StepSizes(prompts=2, group_size=2, prompt_tokens=5, new_tokens=40)
    ours = OurSteps(sizes, folder, "float32", max_tokens=512, threads=1, num_steps=2)
    ours.prepare(tmp_path)
    heard: list[int] = []
    steps = ours.run(heard.append)
    assert heard == [1, 2], "the last step, with its checkpoint, is nobody's"
    assert [s.metrics["sampler/tokens"] for s in steps] == [2 * 2 * 40] * 2
    assert [s.metrics["sampler/prefill_tokens"] for s in steps] == [2 * 5] * 2
    assert len(ours.texts) == len(set(ours.texts)) == 2 * 3
    for step in steps:
        assert step.wall_s >= step.metrics["time/rollout_s"] + step.metrics["time/learner_s"]


def test_what_fails_between_two_steps_is_not_lost(folder: Path, tmp_path: Path) -> None:
    """A run contains what its observers raise, so a dead peer would go unnoticed."""

    def peer_dies(step: int) -> None:
        raise BenchmarkError(f"dead at step {step}")

    sizes = StepSizes(prompts=2, group_size=2, prompt_tokens=5, new_tokens=2)
    ours = OurSteps(sizes, folder, "float32", max_tokens=512, threads=1, num_steps=3)
    ours.prepare(tmp_path)
    with pytest.raises(BenchmarkError, match="dead at step 1"):
        ours.run(peer_dies)

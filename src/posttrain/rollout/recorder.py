"""Exact tokens over turns.

What was sampled is kept as ids. The next prompt is the previous ids, plus what the chat template
writes between an assistant turn and the next generation prompt; nothing is ever decoded and
encoded again. Where a template rewrites history (dropped thinking, trimmed text), the record
forks: a new sequence starts from the template's own rendering, in which earlier sampled text is
observation, so every sampled token still trains exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from posttrain.errors import ModelError
from posttrain.types import (
    Completion,
    FinishReason,
    Float32,
    Int8,
    Int32,
    Message,
    Observation,
    TokenKind,
    TokenSequence,
    Turn,
)

MAX_OPENINGS = 1024
"""Opening prompts that are remembered; a step's groups, and much more."""

_SAMPLED = int(TokenKind.SAMPLED)
_MARK = "\u2045posttrain-turn-{}\u2046"
"""Stands for an assistant's text while the template is asked what it writes around it."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some tokens of a sequence: token_ids [L] int32, kinds [L] int8, logprobs [L] float32,
    versions [L] int32."""

    token_ids: Int32
    kinds: Int8
    logprobs: Float32
    versions: Int32

    @classmethod
    def shown(cls, ids: Sequence[int], kinds: Sequence[int]) -> _Piece:
        """Tokens that were not sampled."""
        count = len(ids)
        return cls(
            np.asarray(ids, np.int32),
            np.asarray(kinds, np.int8),
            np.zeros(count, np.float32),
            np.full(count, -1, np.int32),
        )

    @classmethod
    def sampled(cls, completion: Completion) -> _Piece:
        ids = completion.token_ids
        kinds = np.full(len(ids), _SAMPLED, np.int8)
        return cls(ids, kinds, completion.sampler_logprobs, completion.policy_versions)

    def last(self, count: int) -> _Piece:
        """Its last `count` tokens."""
        return _Piece(
            self.token_ids[-count:],
            self.kinds[-count:],
            self.logprobs[-count:],
            self.versions[-count:],
        )


class Renderer:
    """The one way from messages to prompt ids, for training, rollout and evaluation alike."""

    def __init__(self, tokenizer: Any, eos_token_ids: Sequence[int]) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError(
                f"tokenizer {getattr(tokenizer, 'name_or_path', '?')} has no chat template; add a "
                "chat_template.jinja to the model folder, or use an instruct model"
            )
        if not getattr(tokenizer, "is_fast", False):
            raise ModelError(
                f"tokenizer {type(tokenizer).__name__} gives no character offsets; add a "
                "tokenizer.json to the model folder"
            )
        self._tokenizer = tokenizer
        self.eos_token_ids = frozenset(eos_token_ids)
        self._openings: dict[tuple[Message, ...], _Piece] = {}

    def text(self, messages: Sequence[dict[str, str]], generation_prompt: bool) -> str:
        """The template's text."""
        return self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=generation_prompt
        )

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text. The template has written every special token, so none is added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def encode_with_kinds(self, text: str, scaffold_from: int) -> tuple[list[int], list[int]]:
        """Ids, and SCAFFOLD for every token that reaches beyond character `scaffold_from`."""
        encoded = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        kinds = [
            TokenKind.SCAFFOLD if end > scaffold_from else TokenKind.OBSERVATION
            for _, end in encoded["offset_mapping"]
        ]
        return list(encoded["input_ids"]), [int(k) for k in kinds]

    def opening(self, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        """Prompt ids and kinds of an opening conversation."""
        piece = self.opening_piece(messages)
        return piece.token_ids.tolist(), piece.kinds.tolist()

    def opening_piece(self, messages: Sequence[Message]) -> _Piece:
        """The same as arrays that all siblings share; read them only."""
        key = tuple(messages)
        if key not in self._openings:
            if len(self._openings) >= MAX_OPENINGS:
                self._openings.clear()
            self._openings[key] = _Piece.shown(*self.render(_dicts(messages)))
        return self._openings[key]

    def render(self, history: Sequence[dict[str, str]]) -> tuple[list[int], list[int]]:
        """Ids and kinds of a conversation up to and with the generation prompt."""
        full = self.text(history, True)
        return self.encode_with_kinds(full, _common_length(full, self.text(history, False)))

    def answer_ids(self, messages: Sequence[Message], text: str) -> list[int]:
        """Ids of a given answer and of the end of its turn, to follow `opening(messages)`.

        Raises ModelError when the template rewrites the prompt once it is answered.
        """
        history = _dicts(messages)
        before = self.text(history, True)
        after = self.text([*history, {"role": "assistant", "content": text}], False)
        if not after.startswith(before):
            raise ModelError(
                "the chat template writes another prompt once it is answered, so a given answer "
                "cannot follow it; use a template that only appends"
            )
        ids = self._encode_answer(after[len(before) :], self._around_answer(history, before))
        ends = [i for i, token in enumerate(ids) if token in self.eos_token_ids]
        if ends:
            return ids[: ends[0] + 1]
        return [*ids, min(self.eos_token_ids)] if self.eos_token_ids else ids

    def _around_answer(self, history: list[dict[str, str]], before: str) -> tuple[str, str]:
        """What the template writes before and after an answer that follows `before`."""
        mark = _MARK.format(0)
        marked = self.text([*history, {"role": "assistant", "content": mark}], False)
        head, _, tail = marked[len(before) :].partition(mark)
        return head, tail

    def _encode_answer(self, written: str, around: tuple[str, str]) -> list[int]:
        """Ids of an answer with what the template writes around it. Special tokens are the
        template's alone: in the answer their text stays text."""
        head, tail = around
        said = written[len(head) : len(written) - len(tail)]
        plain = self._tokenizer.encode(
            said, add_special_tokens=False, split_special_tokens=True, verbose=False
        )
        if list(plain) == self.encode(said):
            return self.encode(written)
        return [*self.encode(head), *plain, *self.encode(tail)]

    def prompt_ids(self, messages: Sequence[Message]) -> Int32:
        """Prompt ids [P] int32 of an opening conversation."""
        return self.opening_piece(messages).token_ids.copy()


class Recorder:
    """Builds the prompt of each turn and the token sequences of one trajectory."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._history: list[dict[str, str]] = []
        self._sequences: list[list[_Piece]] = []
        self._prompt = np.empty(0, np.int32)
        self._turns: list[Turn] = []
        self._shown: Observation | None = None
        self.num_forks = 0

    @property
    def turns(self) -> tuple[Turn, ...]:
        return tuple(self._turns)

    def begin(self, observation: Observation, max_prompt: int | None = None) -> Int32:
        """The first prompt [P] int32; its oldest tokens are cut where it exceeds `max_prompt`."""
        self._shown = observation
        self._history = _dicts(observation.messages)
        piece = self._renderer.opening_piece(observation.messages)
        self._sequences.append([piece if max_prompt is None else piece.last(max_prompt)])
        return self._next_prompt()

    def sampled(self, completion: Completion) -> Turn:
        """Record what the policy answered to the last prompt."""
        turn = Turn(self._prompt, completion, self._shown)
        self._sequences[-1].append(_Piece.sampled(completion))
        self._history.append({"role": "assistant", "content": completion.text})
        self._turns.append(turn)
        return turn

    def rewarded(self, reward: float) -> None:
        """Note what the environment gave for the last turn alone."""
        if reward:
            self._turns[-1] = replace(self._turns[-1], reward=float(reward))

    def observe(self, observation: Observation) -> Int32:
        """Append the environment's messages; returns the next prompt [P] int32."""
        self._shown = observation
        new = _dicts(observation.messages)
        glue = self._glue(new)
        self._history.extend(new)
        if glue is None:
            self.num_forks += 1
            self._sequences.append([_Piece.shown(*self._renderer.render(self._history))])
            return self._next_prompt()
        text, scaffold_from = glue
        ids, kinds = self._renderer.encode_with_kinds(text, scaffold_from)
        completion = self._turns[-1].completion
        ended = completion.finish_reason is FinishReason.EOS
        if ended and ids and ids[0] == int(completion.token_ids[-1]):
            ids, kinds = ids[1:], kinds[1:]  # the sampled end of turn is the template's
        self._sequences[-1].append(_Piece.shown(ids, kinds))
        return self._next_prompt()

    def sequences(self) -> tuple[TokenSequence, ...]:
        """All sequences that hold a sampled token."""
        return tuple(_joined(pieces) for pieces in self._sequences if _any_sampled(pieces))

    def _next_prompt(self) -> Int32:
        self._prompt = np.concatenate([piece.token_ids for piece in self._sequences[-1]])
        return self._prompt

    def _glue(self, new: list[dict[str, str]]) -> tuple[str, int] | None:
        """What the template writes after the last assistant turn, or None if it rewrites history.

        The template is asked twice: with the real texts, and with marks in place of them. Only if
        both agree everywhere does it leave earlier turns as they were.
        """
        marked, texts = _with_marks(self._history)
        before = self._renderer.text(marked[:-1], True)
        after = self._renderer.text([*marked, *new], True)
        last = marked[-1]["content"]
        if not after.startswith(before + last):
            return None
        real, after_real = self._renderer.text([*self._history, *new], True), after
        for mark, text in texts.items():
            after_real = after_real.replace(mark, text, 1)
        if after_real != real:
            return None
        suffix = after[len(before) + len(last) :]
        body = _common_length(after, self._renderer.text([*marked, *new], False))
        return suffix, body - len(before) - len(last)


def _joined(pieces: Sequence[_Piece]) -> TokenSequence:
    return TokenSequence(
        np.concatenate([piece.token_ids for piece in pieces]),
        np.concatenate([piece.kinds for piece in pieces]),
        np.concatenate([piece.logprobs for piece in pieces]),
        np.concatenate([piece.versions for piece in pieces]),
    )


def _any_sampled(pieces: Sequence[_Piece]) -> bool:
    return any(len(p.kinds) > 0 and p.kinds[-1] == _SAMPLED for p in pieces)


def _with_marks(
    history: Sequence[dict[str, str]],
) -> tuple[list[dict[str, str]], dict[str, str]]:
    """The history with a mark in place of each assistant text, and what each mark stands for."""
    marked: list[dict[str, str]] = []
    texts: dict[str, str] = {}
    for message in history:
        if message["role"] == "assistant":
            mark = _MARK.format(len(texts))
            texts[mark] = message["content"]
            message = {**message, "content": mark}
        marked.append(message)
    return marked, texts


def _common_length(text: str, without_generation_prompt: str) -> int:
    """Where the generation prompt begins. A template may end a closed conversation with an EOS."""
    pairs = zip(text, without_generation_prompt, strict=False)
    shorter = min(len(text), len(without_generation_prompt))
    return next((i for i, (one, other) in enumerate(pairs) if one != other), shorter)


def _dicts(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": m.role, "content": m.plain_text()} for m in messages]

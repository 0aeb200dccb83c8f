"""Every record that crosses a boundary: frozen, slotted, checked on construction.

Shapes: P prompt tokens, C completion tokens, L tokens of a sample, T packed tokens, G group,
N turns, V vocabulary. Position i of every array describes token i; the shift into labels happens
in one function only (`posttrain.data.packing.label_rows`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

SCHEMA_VERSION = 3
MAX_REWARD = 1e30
"""Larger rewards would overflow float32 sums."""

GIVEN_ROLES = ("demonstration", "chosen", "rejected")
"""Roles of trajectories that were given and not sampled."""
AUXILIARY_ROLES = ("greedy", "hindsight")
"""Roles of trajectories that serve their group and are no part of its statistics."""

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Int8 = NDArray[np.int8]
Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]


class TokenKind(IntEnum):
    """Where a token came from. Policy losses train SAMPLED tokens alone."""

    SAMPLED = 0
    SCAFFOLD = 1  # written by the chat template: headers, end-of-turn glue, generation prompt
    OBSERVATION = 2  # prompt, environment and tool content; sampled text that a fork replays
    DEMONSTRATION = 3  # given to be imitated or compared; supervised losses train it


# As plain numbers: looking a member up in its class costs more than comparing a short array.
_SAMPLED, _DEMONSTRATION = int(TokenKind.SAMPLED), int(TokenKind.DEMONSTRATION)


def trained_kinds(kinds: Int8) -> Bool:
    """True where a token of this kind may be trained by any loss, for kinds [L] int8.

    Example:
        >>> trained_kinds(np.array([0, 1, 2, 3], np.int8)).tolist()
        [True, False, False, True]
    """
    return (kinds == _SAMPLED) | (kinds == _DEMONSTRATION)


class FinishReason(StrEnum):
    """Why the engine stopped one completion."""

    EOS = "eos"
    STOP_STRING = "stop_string"
    LENGTH = "length"  # max_tokens reached
    CONTEXT = "context"  # the model's context is full
    ABORT = "abort"


class StopReason(StrEnum):
    """Why a trajectory ended. None of them is an exception."""

    TERMINATED = "terminated"
    ENV_TRUNCATED = "env_truncated"
    MAX_TURNS = "max_turns"
    LENGTH = "length"
    CONTEXT = "context"
    TIMEOUT = "timeout"
    ABORTED = "aborted"
    FAILED = "failed"


class InvalidKind(StrEnum):
    """Which boundary failed. An `Invalid` is counted and shown; it is never a reward of 0."""

    REWARD_ERROR = "reward_error"  # the reward function raised
    REWARD_TIMEOUT = "reward_timeout"
    REWARD_VALUE = "reward_value"  # NaN, infinite, a string, nothing
    GRADER_CRASH = "grader_crash"
    ENV_ERROR = "env_error"
    ENV_TIMEOUT = "env_timeout"
    ENGINE_ERROR = "engine_error"
    ABORTED = "aborted"


# --- observations -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TextPart:
    """Plain text.

    Example:
        >>> TextPart("2 + 2 = ?").text
        '2 + 2 = ?'
    """

    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image referenced by content hash; pixels live in the media store, never in a record.

    Example:
        >>> ImagePart(sha256="ab" * 32, media_type="image/png", width=8, height=4).width
        8
    """

    sha256: str
    media_type: str
    width: int
    height: int

    def __post_init__(self) -> None:
        if len(self.sha256) != 64:
            raise ValueError(f"ImagePart.sha256 has {len(self.sha256)} characters; need 64 hex")


@dataclass(frozen=True, slots=True)
class AudioPart:
    """Sound referenced by content hash; duration in seconds.

    Example:
        >>> AudioPart(sha256="cd" * 32, media_type="audio/wav", duration_s=1.5).duration_s
        1.5
    """

    sha256: str
    media_type: str
    duration_s: float

    def __post_init__(self) -> None:
        if len(self.sha256) != 64:
            raise ValueError(f"AudioPart.sha256 has {len(self.sha256)} characters; need 64 hex")


@dataclass(frozen=True, slots=True)
class ToolResultPart:
    """What a tool answered to one call.

    Example:
        >>> ToolResultPart("c1", "calculator", (TextPart("4"),)).is_error
        False
    """

    call_id: str
    name: str
    parts: tuple[TextPart | ImagePart | AudioPart, ...]
    is_error: bool = False


Part = TextPart | ImagePart | AudioPart | ToolResultPart


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message of typed parts.

    Example:
        >>> Message.text("user", "hello").plain_text()
        'hello'
    """

    role: str
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))

    @classmethod
    def text(cls, role: str, text: str) -> Message:
        return cls(role, (TextPart(text),))

    def plain_text(self) -> str:
        """The text of all parts. Raises ValueError when a part is not text."""
        texts = []
        for part in self.parts:
            inner = part.parts if isinstance(part, ToolResultPart) else (part,)
            for leaf in inner:
                if not isinstance(leaf, TextPart):
                    raise ValueError(
                        f"message of role {self.role!r} holds a {type(leaf).__name__}; "
                        "this policy reads text only: use a text environment or a multimodal model"
                    )
                texts.append(leaf.text)
        return "".join(texts)


@dataclass(frozen=True, slots=True)
class Observation:
    """What the environment shows next: messages to append to the conversation.

    Example:
        >>> Observation((Message.text("user", "higher"),)).messages[0].role
        'user'
    """

    messages: tuple[Message, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "messages", tuple(self.messages))  # a list is a likely mistake


# --- tasks ------------------------------------------------------------------------------------


class Hidden:
    """What only graders may see: answers, tests, rubrics.

    It has no public attribute, prints nothing, and refuses to be pickled, copied or turned into
    JSON. A grader calls `reveal()`; that call is easy to find in a review.

    Example:
        >>> h = Hidden({"answer": "4"})
        >>> h
        Hidden(<1 field>)
        >>> h.reveal()["answer"]
        '4'
    """

    __slots__ = ("_fields",)

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = dict(fields)

    def reveal(self) -> dict[str, Any]:
        """A copy of the hidden fields, for a grader."""
        return dict(self._fields)

    def __repr__(self) -> str:
        count = len(self._fields)
        return f"Hidden(<{count} field{'' if count == 1 else 's'}>)"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "Hidden task data refuses to be serialised; pass hidden.reveal() to a grader instead"
        )


@dataclass(frozen=True, slots=True)
class Task:
    """One problem: a public part that may go anywhere and a hidden part for graders.

    `task_id` is unique within its set; `metadata` is public and JSON-able.

    Example:
        >>> t = Task("add-1", (Message.text("user", "1+1"),), Hidden({"answer": "2"}))
        >>> t.prompt[0].plain_text()
        '1+1'
    """

    task_id: str
    prompt: tuple[Message, ...]
    hidden: Hidden
    metadata: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str = ""

    def __post_init__(self) -> None:
        if not self.task_id:
            raise ValueError("Task.task_id is empty; give every task a unique id")
        if not self.prompt:
            raise ValueError(f"task {self.task_id!r} has no prompt message")


# --- verdicts ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RewardTerm:
    """One component of a reward: its own value and weight.

    Example:
        >>> RewardTerm("exact", 1.0).weight
        1.0
    """

    name: str
    value: float
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Scored:
    """A verdict that may be trained on. `value` is finite; `evidence` says why, for people.

    `correct` is the outcome that accuracy counts, apart from shaping terms: by default value >= 1.
    `parsed` is False when no answer could be found in the output.

    Example:
        >>> Scored(1.0, (RewardTerm("exact", 1.0),), "answer 4").correct
        True
    """

    value: float
    terms: tuple[RewardTerm, ...] = ()
    evidence: str = ""
    parsed: bool = True
    correct: bool = field(default=None)  # type: ignore[assignment]  # filled below

    def __post_init__(self) -> None:
        if not isinstance(self.value, float) or not math.isfinite(self.value):
            raise ValueError(f"Scored.value is {self.value!r}; a reward must be a finite float")
        if abs(self.value) > MAX_REWARD:
            raise ValueError(f"Scored.value is {self.value:g}; rewards go up to {MAX_REWARD:g}")
        if not all(isinstance(term, RewardTerm) for term in self.terms):
            raise ValueError(f"Scored.terms is {self.terms!r}; give a tuple of RewardTerm")
        if self.correct not in (None, True, False):
            raise ValueError(f"Scored.correct is {self.correct!r}; give True or False")
        if self.correct is None:
            object.__setattr__(self, "correct", self.value >= 1.0)


@dataclass(frozen=True, slots=True)
class Invalid:
    """A failure of something that is not the policy. Never trained, never averaged.

    Example:
        >>> Invalid(InvalidKind.REWARD_TIMEOUT, "killed after 5 s", retryable=True).retryable
        True
    """

    kind: InvalidKind
    reason: str
    retryable: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.kind, InvalidKind):
            raise ValueError(f"Invalid.kind is {self.kind!r}; use a member of InvalidKind")


Verdict = Scored | Invalid


# --- generation -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. `temperature == 0` is greedy; `top_p == 1` and `top_k == 0` keep everything.

    The reported log-prob is that of the distribution actually sampled: after temperature and
    after truncation.

    Example:
        >>> SamplingParams(max_tokens=8).temperature
        1.0
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; need at least 1")
        if self.temperature < 0 or 0 < self.temperature < 1e-3:
            raise ValueError(
                f"temperature is {self.temperature}; use 0 for greedy or a value >= 0.001"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; need 0 < top_p <= 1")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; use 0 to keep every token")
        if any(not s for s in self.stop):
            raise ValueError("stop holds an empty string; remove it")


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine sampled for one prompt: facts, exactly as sampled.

    token_ids [C] int32, sampler_logprobs [C] float32, policy_versions [C] int32. A final EOS is
    part of the ids. `text` is decoded once from all ids without the EOS and without the matched
    stop string.

    Example:
        >>> c = Completion.build([5, 2], [-0.1, -0.2], [0, 0], FinishReason.EOS, "hi")
        >>> len(c)
        2
    """

    token_ids: Int32
    sampler_logprobs: Float32
    policy_versions: Int32
    finish_reason: FinishReason
    text: str

    @classmethod
    def build(
        cls, token_ids: Any, logprobs: Any, versions: Any, finish_reason: FinishReason, text: str
    ) -> Completion:
        """From any sequences; converts dtypes."""
        return cls(
            np.asarray(token_ids, np.int32),
            np.asarray(logprobs, np.float32),
            np.asarray(versions, np.int32),
            finish_reason,
            text,
        )

    def __post_init__(self) -> None:
        _check_vector("Completion.token_ids", self.token_ids, np.int32, len(self.token_ids))
        _check_vector(
            "Completion.sampler_logprobs", self.sampler_logprobs, np.float32, len(self.token_ids)
        )
        _check_vector(
            "Completion.policy_versions", self.policy_versions, np.int32, len(self.token_ids)
        )

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call: what was shown, the ids that were sent [P] int32, and what came back.

    `observation` is what the environment showed since the previous turn; `reward` is what the
    environment gave for this turn alone, on top of the verdict's outcome.

    Example:
        >>> c = Completion.build([2], [-0.2], [0], FinishReason.EOS, "")
        >>> Turn(np.array([1, 5], np.int32), c).num_tokens
        3
    """

    prompt_token_ids: Int32
    completion: Completion
    observation: Observation | None = None
    reward: float = 0.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward) or abs(self.reward) > MAX_REWARD:
            raise ValueError(f"Turn.reward is {self.reward!r}; a reward must be a finite float")
        _check_vector(
            "Turn.prompt_token_ids", self.prompt_token_ids, np.int32, len(self.prompt_token_ids)
        )

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.completion)


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Consecutive tokens that one forward pass sees: the unit of training.

    token_ids [L] int32, kinds [L] int8 (`TokenKind`), sampler_logprobs [L] float32 (0 where not
    sampled), policy_versions [L] int32 (-1 where not sampled).

    Example:
        >>> s = TokenSequence.build([1, 5, 2], [2, 0, 0], [0, -0.1, -0.2], [-1, 0, 0])
        >>> s.loss_mask.tolist()
        [False, True, True]
    """

    token_ids: Int32
    kinds: Int8
    sampler_logprobs: Float32
    policy_versions: Int32

    @classmethod
    def build(cls, token_ids: Any, kinds: Any, logprobs: Any, versions: Any) -> TokenSequence:
        """From any sequences; converts dtypes."""
        return cls(
            np.asarray(token_ids, np.int32),
            np.asarray(kinds, np.int8),
            np.asarray(logprobs, np.float32),
            np.asarray(versions, np.int32),
        )

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        _check_vector("TokenSequence.token_ids", self.token_ids, np.int32, length)
        _check_vector("TokenSequence.kinds", self.kinds, np.int8, length)
        _check_vector("TokenSequence.sampler_logprobs", self.sampler_logprobs, np.float32, length)
        _check_vector("TokenSequence.policy_versions", self.policy_versions, np.int32, length)
        if np.logical_and(self.loss_mask, self.policy_versions < 0).any():
            raise ValueError("TokenSequence has a sampled token without a policy version")

    @property
    def loss_mask(self) -> Bool:
        """What the policy sampled."""
        return self.kinds == _SAMPLED

    @property
    def trained_mask(self) -> Bool:
        """What any loss may train: sampled and demonstrated tokens."""
        return trained_kinds(self.kinds)

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One agent on one task: turns as they happened, sequences as they train, one verdict.

    More than one sequence means that the chat template rewrote history and the record forked;
    every sampled token is SAMPLED in exactly one of them.

    `role` tells members of a group apart that are not plain siblings: "greedy" for the greedy
    answer that ReMax compares with, "hindsight" for a demonstration made of a sibling's answer,
    "demonstration", "chosen" and "rejected" for given ones, or a player of a game.

    Example:
        >>> c = Completion.build([7, 2], [-0.1, -0.2], [0, 0], FinishReason.EOS, "4")
        >>> s = TokenSequence.build([1, 7, 2], [2, 0, 0], [0, -0.1, -0.2], [-1, 0, 0])
        >>> t = Trajectory(0, 0, 11, (Turn(np.array([1], np.int32), c),), (s,), Scored(1.0),
        ...                StopReason.TERMINATED)
        >>> t.num_sampled_tokens
        2
    """

    draw_id: int
    sample_index: int
    seed: int
    turns: tuple[Turn, ...]
    sequences: tuple[TokenSequence, ...]
    verdict: Verdict
    stop_reason: StopReason
    attempts: int = 1
    fingerprint: str = ""
    role: str = ""

    def __post_init__(self) -> None:
        sampled = sum(len(turn.completion) for turn in self.turns)
        trained = self.num_sampled_tokens
        if sampled != trained:
            raise ValueError(
                f"trajectory {self.draw_id}.{self.sample_index}: {sampled} tokens were sampled but "
                f"{trained} are marked SAMPLED; every sampled token trains exactly once"
            )

    @property
    def num_sampled_tokens(self) -> int:
        return sum(int(np.count_nonzero(s.loss_mask)) for s in self.sequences)

    @property
    def truncated(self) -> bool:
        return self.stop_reason in (StopReason.LENGTH, StopReason.CONTEXT, StopReason.MAX_TURNS)

    @property
    def cut(self) -> bool:
        """Whether a limit ended it, the environment's own included: its last state has a future."""
        return self.truncated or self.stop_reason is StopReason.ENV_TRUNCATED

    @property
    def reward(self) -> float:
        """The reward. Raises TypeError for an invalid trajectory: there is none."""
        if isinstance(self.verdict, Invalid):
            raise TypeError(f"trajectory {self.draw_id}.{self.sample_index} is {self.verdict}")
        return self.verdict.value

    @property
    def min_policy_version(self) -> int:
        """The oldest policy that sampled a token of it; -1 when nothing was sampled."""
        versions = [s.policy_versions[s.loss_mask] for s in self.sequences]
        return min((int(v.min()) for v in versions if len(v)), default=-1)


@dataclass(frozen=True, slots=True)
class Draw:
    """One task taken from the curriculum, with everything needed to repeat it.

    `draw_id` counts from 0 over the run (train draws and evaluation draws count apart);
    `environment` names the member of a mixture that the task came from.

    Example:
        >>> Draw(3, "add-17", epoch=0, seed=99).task_id
        'add-17'
    """

    draw_id: int
    task_id: str
    epoch: int
    seed: int
    environment: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Siblings: all trajectories of one draw [G]. Keyed by the draw, never by the task.

    Example:
        >>> c = Completion.build([2], [-0.2], [0], FinishReason.EOS, "")
        >>> s = TokenSequence.build([1, 2], [2, 0], [0, -0.2], [-1, 0])
        >>> def member(i, verdict):
        ...     return Trajectory(0, i, i, (Turn(np.array([1], np.int32), c),), (s,), verdict,
        ...                       StopReason.TERMINATED)
        >>> bad = Invalid(InvalidKind.REWARD_ERROR, "boom")
        >>> g = Group(Draw(0, "t", 0, 5), (member(0, Scored(1.0)), member(1, bad)))
        >>> len(g), len(g.valid)
        (2, 1)
    """

    draw: Draw
    trajectories: tuple[Trajectory, ...]

    def __post_init__(self) -> None:
        for t in self.trajectories:
            if t.draw_id != self.draw.draw_id:
                raise ValueError(f"group of draw {self.draw.draw_id} holds one of {t.draw_id}")

    def __len__(self) -> int:
        return len(self.trajectories)

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    @property
    def siblings(self) -> tuple[Trajectory, ...]:
        """The members that are compared with each other: without greedy and hindsight ones."""
        return tuple(t for t in self.trajectories if t.role not in AUXILIARY_ROLES)

    @property
    def valid(self) -> tuple[Trajectory, ...]:
        """Siblings with a reward."""
        return tuple(t for t in self.siblings if isinstance(t.verdict, Scored))

    @property
    def min_policy_version(self) -> int:
        """The oldest policy that sampled a token of it; -1 when nothing was sampled."""
        versions = (t.min_policy_version for t in self.trajectories)
        return min((version for version in versions if version >= 0), default=-1)


# --- training ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One row of training: token_ids [L] int32, loss_mask [L] bool, sampler_logprobs [L] float32,
    policy_versions [L] int32, turn_index [L] int32 (-1 outside the mask), and streams: for each
    loss that reads this sample a weight per token [L] float32 (0 outside the mask). For a policy
    loss the weights are advantages, or rewards where a token-level estimator makes them. `cut` is
    True for the last sequence of a trajectory that a limit ended.

    Example:
        >>> s = TrainSample(np.array([1, 2], np.int32), np.array([False, True]),
        ...     np.zeros(2, np.float32), np.array([-1, 0], np.int32), np.array([-1, 0], np.int32),
        ...     {"policy": np.array([0, .5], np.float32)}, draw_id=0, sample_index=0)
        >>> s.num_loss_tokens
        1
    """

    token_ids: Int32
    loss_mask: Bool
    sampler_logprobs: Float32
    policy_versions: Int32
    turn_index: Int32
    streams: Mapping[str, Float32]
    draw_id: int
    sample_index: int
    cut: bool = False

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        _check_vector("TrainSample.token_ids", self.token_ids, np.int32, length)
        _check_vector("TrainSample.loss_mask", self.loss_mask, np.bool_, length)
        _check_vector("TrainSample.sampler_logprobs", self.sampler_logprobs, np.float32, length)
        _check_vector("TrainSample.policy_versions", self.policy_versions, np.int32, length)
        _check_vector("TrainSample.turn_index", self.turn_index, np.int32, length)
        for name, weights in self.streams.items():
            _check_vector(f"TrainSample.streams[{name!r}]", weights, np.float32, length)
        if length and self.loss_mask[0]:
            raise ValueError("TrainSample: token 0 has no context and cannot be trained")

    @property
    def num_loss_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask))

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """What one optimizer step trains on.

    `num_loss_tokens` and `num_sequences` are the global denominators, fixed before any split into
    micro-batches or ranks. `draw_ids` are all draws the step consumed, in order, trained or not;
    `dropped` maps those that carry no sample to the reason. `metrics` are about the groups.

    Example:
        >>> TrainBatch(step=1, samples=(), draw_ids=(4,), dropped={4: "zero_variance"}).step
        1
    """

    step: int
    samples: tuple[TrainSample, ...]
    draw_ids: tuple[int, ...]
    dropped: Mapping[int, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_loss_tokens(self) -> int:
        return sum(s.num_loss_tokens for s in self.samples)

    @property
    def num_sequences(self) -> int:
        return sum(1 for s in self.samples if s.num_loss_tokens)


@dataclass(frozen=True, slots=True)
class Stream:
    """The trained tokens that one loss reads: index [M] int64 into a micro-batch's N trained
    tokens, ascending, and weights [M] float32.

    Example:
        >>> len(Stream(np.array([0, 2]), np.ones(2, np.float32)))
        2
    """

    index: Int64
    weights: Float32

    def __post_init__(self) -> None:
        _check_vector("Stream.weights", self.weights, np.float32, len(self.index))

    def __len__(self) -> int:
        return len(self.index)


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Samples merged into a prefix tree for one forward pass, without padding.

    Rows: token_ids [T] int64, position_ids [T] int64. paths: the rows of each sample in order;
    first_owned: how many of them an earlier sample brought. Trained tokens, sample by sample:
    predict_rows [N] int64 (the row whose logits predict it), own_rows [N] int64 (its own row),
    sampler_logprobs [N] float32, policy_versions and turn_index [N] int64, sample_index [N] int64
    (which sample it belongs to). owners: draw and number of the trajectory of each sample;
    cut: whether a limit ended it there.
    streams: what each loss reads. num_repeated_rows: rows that an earlier micro-batch of the same
    pass computes too.

    Example:
        >>> rows = np.array([0, 1])
        >>> m = Microbatch(np.array([1, 2]), rows, (rows,), (0,), rows[:1], rows[1:],
        ...     np.zeros(1, np.float32), rows[:1], rows[:1], rows[:1], ((7, 0),),
        ...     {"policy": Stream(rows[:1], np.ones(1, np.float32))})
        >>> m.num_rows, m.num_tokens, m.num_loss_tokens, m.labels.tolist()
        (2, 2, 1, [2])
    """

    token_ids: Int64
    position_ids: Int64
    paths: tuple[Int64, ...]
    first_owned: tuple[int, ...]
    predict_rows: Int64
    own_rows: Int64
    sampler_logprobs: Float32
    policy_versions: Int64
    turn_index: Int64
    sample_index: Int64
    owners: tuple[tuple[int, int], ...]
    streams: Mapping[str, Stream]
    cut: tuple[bool, ...] = ()
    num_repeated_rows: int = 0

    def __post_init__(self) -> None:
        _check_vector("Microbatch.position_ids", self.position_ids, np.int64, self.num_rows)
        count = self.num_loss_tokens
        for name in ("predict_rows", "policy_versions", "turn_index", "sample_index"):
            _check_vector(f"Microbatch.{name}", getattr(self, name), np.int64, count)
        _check_vector("Microbatch.sampler_logprobs", self.sampler_logprobs, np.float32, count)

    @property
    def labels(self) -> Int64:
        """The trained tokens [N]."""
        return self.token_ids[self.own_rows]

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of the samples, shared ones counted for each."""
        return sum(len(path) for path in self.paths)

    @property
    def num_loss_tokens(self) -> int:
        return len(self.own_rows)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an optimizer step did. `skipped` says why the weights did not move, if they did not.

    `policy_version` counts completed steps, skipped ones included; `weights_hash` is the SHA-256
    of the trainable parameters afterwards.

    Example:
        >>> StepResult(1, 1, "00" * 32, {"learner/grad_norm": 0.5}).skipped is None
        True
    """

    step: int
    policy_version: int
    weights_hash: str
    metrics: Mapping[str, float]
    skipped: str | None = None


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What an environment answers to a turn.

    `observation` is shown next unless the episode ended. `verdict` is for environments that grade
    themselves: at the end, and on the way what the episode is worth if a limit ends it there. It
    is left None where a `Reward` judges. `reward` is for this turn alone and comes on top.

    Example:
        >>> StepOutcome(None, terminated=True).verdict is None
        True
    """

    observation: Observation | None
    terminated: bool = False
    truncated: bool = False
    verdict: Verdict | None = None
    reward: float = 0.0

    def __post_init__(self) -> None:
        if not (self.terminated or self.truncated) and self.observation is None:
            raise ValueError("StepOutcome of a going episode needs an observation")
        if self.verdict is not None and not isinstance(self.verdict, Scored | Invalid):
            raise ValueError(
                f"StepOutcome.verdict is {self.verdict!r}; give Scored(value) or Invalid(...)"
            )


def _check_vector(name: str, array: Any, dtype: Any, length: int) -> None:
    if not isinstance(array, np.ndarray) or array.ndim != 1:
        raise ValueError(f"{name} must be a 1-D numpy array, got {type(array).__name__}")
    if array.dtype.type is not dtype or not array.dtype.isnative:
        raise ValueError(f"{name} has dtype {array.dtype}, need {np.dtype(dtype)}")
    if len(array) != length:
        raise ValueError(f"{name} has {len(array)} entries, need {length}")

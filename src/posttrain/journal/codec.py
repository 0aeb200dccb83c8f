"""A group as bytes and back, exactly: a JSON head and the raw little-endian token arrays.

Layout of a payload:

    uint32   length of the head in bytes, a multiple of 4
    head     JSON in UTF-8 (lone surrogates kept), padded with spaces
    int32    prompt ids, completion ids, completion versions of every turn;
             token ids, policy versions of every sequence
    float32  sampler log-probs in the same order
    int8     kinds of every sequence

Everything goes trajectory by trajectory, turns before sequences; the head holds the lengths.
Floats of the head are written by `repr`, so they come back as the same float64, NaN as NaN.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posttrain.errors import JournalCorruptError, JournalError, SchemaVersionError
from posttrain.types import (
    SCHEMA_VERSION,
    AudioPart,
    Completion,
    Draw,
    FinishReason,
    Float32,
    Group,
    ImagePart,
    Int8,
    Int32,
    Invalid,
    InvalidKind,
    Message,
    Observation,
    RewardTerm,
    Scored,
    StopReason,
    TextPart,
    TokenSequence,
    ToolResultPart,
    Trajectory,
    Turn,
)

_HEAD_LENGTH = struct.Struct("<I")
_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")
_INT8 = np.dtype("i1")
_HEAD = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def encode_group(group: Group) -> bytes:
    """The payload of one group. Raises JournalError when a field has no JSON form."""
    integers: list[NDArray[Any]] = []
    floats: list[NDArray[Any]] = []
    kinds: list[NDArray[Any]] = []
    head = {
        "schema_version": SCHEMA_VERSION,
        "draw": _encode_draw(group.draw),
        "trajectories": [_encode_trajectory(t, integers, floats, kinds) for t in group],
    }
    try:
        text = _HEAD.encode(head)
    except (TypeError, ValueError) as cause:
        raise JournalError(
            f"group of draw {group.draw.draw_id} cannot be recorded: {cause}; "
            "records hold plain strings, numbers and booleans"
        ) from cause
    head_bytes = text.encode("utf-8", "surrogatepass")
    head_bytes += b" " * (-len(head_bytes) % 4)
    blocks = [
        np.concatenate(arrays).astype(dtype, copy=False).data
        for arrays, dtype in ((integers, _INT32), (floats, _FLOAT32), (kinds, _INT8))
        if arrays
    ]
    return b"".join([_HEAD_LENGTH.pack(len(head_bytes)), head_bytes, *blocks])


def decode_group(payload: bytes) -> Group:
    """The group of a payload whose checksum was right; its arrays are writable.

    Raises SchemaVersionError for a payload of another version and JournalCorruptError for bytes
    that are no payload.
    """
    try:
        head, arrays = _split(payload)
        trajectories = tuple(_decode_trajectory(t, arrays) for t in head["trajectories"])
        group = Group(_decode_draw(head["draw"]), trajectories)
        arrays.check_consumed()
    except (ValueError, KeyError, TypeError, IndexError, struct.error) as cause:
        raise JournalCorruptError(
            f"a group record cannot be decoded: {cause!r}; "
            "read the run with the posttrain version that wrote it"
        ) from cause
    return group


class _Arrays:
    """The three array blocks of a payload, handed out in the order they were written."""

    def __init__(self, block: bytearray, num_int32: int, num_float32: int) -> None:
        end_int32 = 4 * num_int32
        end_float32 = end_int32 + 4 * num_float32
        view = memoryview(block)
        self._integers = np.frombuffer(view[:end_int32], _INT32).astype(np.int32, copy=False)
        self._floats = np.frombuffer(view[end_int32:end_float32], _FLOAT32).astype(
            np.float32, copy=False
        )
        self._kinds = np.frombuffer(view[end_float32:], _INT8)
        self._next_integer = self._next_float = self._next_kind = 0

    def integers(self, length: int) -> Int32:
        start, self._next_integer = self._next_integer, self._next_integer + length
        return self._integers[start : self._next_integer]

    def floats(self, length: int) -> Float32:
        start, self._next_float = self._next_float, self._next_float + length
        return self._floats[start : self._next_float]

    def kinds(self, length: int) -> Int8:
        start, self._next_kind = self._next_kind, self._next_kind + length
        return self._kinds[start : self._next_kind]

    def check_consumed(self) -> None:
        if (self._next_integer, self._next_float, self._next_kind) != (
            len(self._integers),
            len(self._floats),
            len(self._kinds),
        ):
            raise ValueError("the array blocks are longer or shorter than the head says")


def _split(payload: bytes) -> tuple[dict[str, Any], _Arrays]:
    (head_length,) = _HEAD_LENGTH.unpack_from(payload)
    start = _HEAD_LENGTH.size
    head = json.loads(payload[start : start + head_length].decode("utf-8", "surrogatepass"))
    if head["schema_version"] != SCHEMA_VERSION:
        raise SchemaVersionError(
            f"a group record has schema version {head['schema_version']}; this code reads "
            f"{SCHEMA_VERSION}: read it with the posttrain version that wrote the run"
        )
    num_int32 = num_float32 = 0
    for trajectory in head["trajectories"]:
        for turn in trajectory["turns"]:
            num_int32 += turn["num_prompt"] + 2 * turn["num_completion"]
            num_float32 += turn["num_completion"]
        for length in trajectory["sequences"]:
            num_int32 += 2 * length
            num_float32 += length
    return head, _Arrays(bytearray(payload[start + head_length :]), num_int32, num_float32)


def _encode_draw(draw: Draw) -> list[Any]:
    return [int(draw.draw_id), draw.task_id, int(draw.epoch), int(draw.seed), draw.environment]


def _decode_draw(fields: list[Any]) -> Draw:
    return Draw(*fields)


def _encode_trajectory(
    trajectory: Trajectory,
    integers: list[NDArray[Any]],
    floats: list[NDArray[Any]],
    kinds: list[NDArray[Any]],
) -> dict[str, Any]:
    turns = []
    for turn in trajectory.turns:
        completion = turn.completion
        integers += (turn.prompt_token_ids, completion.token_ids, completion.policy_versions)
        floats.append(completion.sampler_logprobs)
        turns.append(
            {
                "num_prompt": len(turn.prompt_token_ids),
                "num_completion": len(completion),
                "finish_reason": completion.finish_reason.value,
                "text": completion.text,
                "observation": _encode_observation(turn.observation),
                "reward": float(turn.reward),
            }
        )
    for sequence in trajectory.sequences:
        integers += (sequence.token_ids, sequence.policy_versions)
        floats.append(sequence.sampler_logprobs)
        kinds.append(sequence.kinds)
    return {
        "sample_index": int(trajectory.sample_index),
        "seed": int(trajectory.seed),
        "draw_id": int(trajectory.draw_id),
        "turns": turns,
        "sequences": [len(s) for s in trajectory.sequences],
        "verdict": _encode_verdict(trajectory.verdict),
        "stop_reason": trajectory.stop_reason.value,
        "attempts": int(trajectory.attempts),
        "fingerprint": trajectory.fingerprint,
        "role": trajectory.role,
    }


def _decode_trajectory(fields: dict[str, Any], arrays: _Arrays) -> Trajectory:
    turns = tuple(_decode_turn(turn, arrays) for turn in fields["turns"])
    sequences = []
    for length in fields["sequences"]:
        token_ids, versions = arrays.integers(length), arrays.integers(length)
        logprobs, kinds = arrays.floats(length), arrays.kinds(length)
        sequences.append(TokenSequence(token_ids, kinds, logprobs, versions))
    return Trajectory(
        fields["draw_id"],
        fields["sample_index"],
        fields["seed"],
        turns,
        tuple(sequences),
        _decode_verdict(fields["verdict"]),
        StopReason(fields["stop_reason"]),
        fields["attempts"],
        fields["fingerprint"],
        fields["role"],
    )


def _decode_turn(fields: dict[str, Any], arrays: _Arrays) -> Turn:
    prompt_token_ids = arrays.integers(fields["num_prompt"])
    length = fields["num_completion"]
    token_ids, versions = arrays.integers(length), arrays.integers(length)
    completion = Completion(
        token_ids,
        arrays.floats(length),
        versions,
        FinishReason(fields["finish_reason"]),
        fields["text"],
    )
    observation = _decode_observation(fields["observation"])
    return Turn(prompt_token_ids, completion, observation, fields["reward"])


def _encode_verdict(verdict: Scored | Invalid) -> list[Any]:
    if isinstance(verdict, Invalid):
        return ["invalid", verdict.kind.value, verdict.reason, bool(verdict.retryable)]
    terms = [[t.name, float(t.value), float(t.weight)] for t in verdict.terms]
    flags = [bool(verdict.parsed), bool(verdict.correct)]
    return ["scored", float(verdict.value), terms, verdict.evidence, *flags]


def _decode_verdict(fields: list[Any]) -> Scored | Invalid:
    if fields[0] == "invalid":
        _, kind, reason, retryable = fields
        return Invalid(InvalidKind(kind), reason, retryable)
    _, value, terms, evidence, parsed, correct = fields
    return Scored(value, tuple(RewardTerm(*term) for term in terms), evidence, parsed, correct)


def _encode_observation(observation: Observation | None) -> list[Any] | None:
    if observation is None:
        return None
    return [[m.role, [_encode_part(p) for p in m.parts]] for m in observation.messages]


def _decode_observation(messages: list[Any] | None) -> Observation | None:
    if messages is None:
        return None
    return Observation(
        tuple(Message(role, tuple(_decode_part(p) for p in parts)) for role, parts in messages)
    )


def _encode_part(part: TextPart | ImagePart | AudioPart | ToolResultPart) -> list[Any]:
    match part:
        case TextPart(text):
            return ["text", text]
        case ImagePart(sha256, media_type, width, height):
            return ["image", sha256, media_type, int(width), int(height)]
        case AudioPart(sha256, media_type, duration_s):
            return ["audio", sha256, media_type, float(duration_s)]
        case ToolResultPart(call_id, name, parts, is_error):
            return ["tool_result", call_id, name, [_encode_part(p) for p in parts], bool(is_error)]


def _decode_part(fields: list[Any]) -> Any:
    kind, *rest = fields
    if kind == "tool_result":
        call_id, name, parts, is_error = rest
        return ToolResultPart(call_id, name, tuple(_decode_part(p) for p in parts), is_error)
    return {"text": TextPart, "image": ImagePart, "audio": AudioPart}[kind](*rest)

"""Append-only segment files of checksummed frames: `segments/00000001.seg` and so on.

A segment is nothing but frames, end to end; there is no byte that no checksum covers:

    magic           4 bytes  b"PTJ1"
    kind            uint32   FrameKind
    draw_id         int64
    policy_version  int64    of an evaluation; 0 for training groups
    length          uint64   of the payload
    sha256          32 bytes over the 32 bytes above and the payload
    payload         `length` bytes

All numbers are little-endian. SQLite rows refer to a frame by (segment, offset, length, sha256),
where length counts the head too.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from posttrain.errors import JournalCorruptError
from posttrain.journal.storage import os_error, storage_errors, sync_folder

FOLDER_NAME = "segments"
DEFAULT_SEGMENT_BYTES = 64 * 1024 * 1024
MAGIC = b"PTJ1"

_FIELDS = struct.Struct("<4sIqqQ")
_DIGEST_BYTES = 32
HEAD_BYTES = _FIELDS.size + _DIGEST_BYTES
_NAME = re.compile(r"(\d{8,})\.seg")


class FrameKind(IntEnum):
    """What a payload is."""

    TRAIN_GROUP = 1
    EVAL_GROUP = 2


@dataclass(frozen=True, slots=True)
class FrameRef:
    """Where a frame lies; `length` in bytes with its head, `sha256` 32 raw bytes.

    Example:
        >>> FrameRef(1, 0, 100, bytes(32), FrameKind.TRAIN_GROUP, draw_id=7, policy_version=0).end
        100
    """

    segment: int
    offset: int
    length: int
    sha256: bytes
    kind: FrameKind
    draw_id: int
    policy_version: int

    @property
    def end(self) -> int:
        return self.offset + self.length


def segment_path(run_dir: Path, segment: int) -> Path:
    """The file of segment number `segment`, counted from 1."""
    return run_dir / FOLDER_NAME / f"{segment:08d}.seg"


def segment_numbers(run_dir: Path) -> list[int]:
    """Numbers of the segment files that exist, ascending."""
    folder = run_dir / FOLDER_NAME
    if not folder.is_dir():
        return []
    matches = (_NAME.fullmatch(name) for name in os.listdir(folder))
    return sorted(int(m.group(1)) for m in matches if m)


def build_frame(
    kind: FrameKind, draw_id: int, policy_version: int, payload: bytes
) -> tuple[bytes, bytes]:
    """Head with digest, and the digest alone (32 bytes)."""
    fields = _FIELDS.pack(MAGIC, kind, draw_id, policy_version, len(payload))
    digest = hashlib.sha256(fields)
    digest.update(payload)
    sha256 = digest.digest()
    return fields + sha256, sha256


def frame_fault(frame: bytes, ref: FrameRef) -> str | None:
    """What is wrong with the bytes found at `ref`, or None. Any changed bit is found."""
    if len(frame) < ref.length:
        return f"the file ends after {len(frame)} of {ref.length} bytes"
    magic, kind, draw_id, policy_version, length = _FIELDS.unpack_from(frame)
    if magic != MAGIC:
        return f"the frame starts with {magic!r}, not {MAGIC!r}"
    found = (kind, draw_id, policy_version, length + HEAD_BYTES)
    if found != (ref.kind, ref.draw_id, ref.policy_version, ref.length):
        return (
            f"the frame says kind {kind}, draw {draw_id}, policy version {policy_version}, "
            f"{length + HEAD_BYTES} bytes; the journal says kind {ref.kind}, draw {ref.draw_id}, "
            f"policy version {ref.policy_version}, {ref.length} bytes"
        )
    digest = hashlib.sha256(memoryview(frame)[: _FIELDS.size])
    digest.update(memoryview(frame)[HEAD_BYTES : ref.length])
    if digest.digest() != frame[_FIELDS.size : HEAD_BYTES]:
        return f"the SHA-256 of its bytes is {digest.hexdigest()[:16]}..., not the one it carries"
    if digest.digest() != ref.sha256:
        return f"its SHA-256 {digest.hexdigest()[:16]}... is not the one the journal recorded"
    return None


def read_payload(run_dir: Path, ref: FrameRef) -> bytes:
    """The payload at `ref`, checked against both checksums.

    Raises JournalCorruptError that names segment file, byte offset and draw.
    """
    path = segment_path(run_dir, ref.segment)
    frame, fault = read_frame(path, ref)
    if fault is not None:
        raise JournalCorruptError(
            f"{path}: byte {ref.offset}: the group of draw {ref.draw_id} is damaged: {fault}; "
            "restore this file from a copy, or go back to a checkpoint and resume"
        )
    return frame[HEAD_BYTES:]


def read_frame(path: Path, ref: FrameRef) -> tuple[bytes, str | None]:
    """The bytes at `ref` and what is wrong with them, if anything. Raises StorageError."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return b"", "the file is missing"
    except OSError as cause:
        raise os_error(path, "open", cause) from cause
    try:
        with storage_errors(path, f"read {ref.length} bytes at {ref.offset}"):
            frame = _read_fully(descriptor, ref.length, ref.offset)
    finally:
        os.close(descriptor)
    return frame, frame_fault(frame, ref)


def _read_fully(descriptor: int, length: int, offset: int) -> bytes:
    data = os.pread(descriptor, length, offset)
    while len(data) < length:  # a read may be short (2 GiB limit on Linux)
        more = os.pread(descriptor, length - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


class SegmentWriter:
    """Appends frames behind the last referenced byte. Not durable before `sync`.

    `append` leaves the files as they were when it raises; `cut` takes appended frames back.
    Raises StorageError naming path, size and remedy when the disk refuses.
    """

    def __init__(self, run_dir: Path, segment: int, end: int, max_bytes: int) -> None:
        """Continue segment number `segment` at byte `end`; the file need not exist when 0."""
        self._run_dir = run_dir
        self._max_bytes = max_bytes
        self.segment = segment
        self.end = end
        self._descriptor = -1
        self._unsynced = False
        self._new_name = False

    def append(
        self, kind: FrameKind, draw_id: int, policy_version: int, payload: bytes
    ) -> FrameRef:
        """Write one frame, in a new segment when this one is full."""
        head, sha256 = build_frame(kind, draw_id, policy_version, payload)
        length = len(head) + len(payload)
        if self.end and self.end + length > self._max_bytes:
            self.sync()
            self.close()
            self.segment, self.end = self.segment + 1, 0
        path = segment_path(self._run_dir, self.segment)
        offset = self.end
        try:
            with storage_errors(path, f"write {length:,} bytes at {offset:,}"):
                self._open(path)
                self._unsynced = True
                self._write_fully(head, payload, offset)
        except BaseException:
            self.cut(self.segment, offset)
            raise
        self.end = offset + length
        return FrameRef(self.segment, offset, length, sha256, kind, draw_id, policy_version)

    def cut(self, segment: int, end: int) -> None:
        """Forget everything after byte `end` of `segment`, the position before some appends."""
        if segment != self.segment:  # an append started a new segment; empty that one
            self._truncate(0)
            self.close()
            self._unsynced = False  # the older segment was flushed when it was left
        self.segment, self.end = segment, end
        self._truncate(end)

    def sync(self) -> None:
        """Make every appended byte survive a power loss."""
        if not self._unsynced:
            return
        path = segment_path(self._run_dir, self.segment)
        with storage_errors(path, "flush"):
            os.fsync(self._descriptor)
            if self._new_name:
                sync_folder(path.parent)
                self._new_name = False
        self._unsynced = False

    def close(self) -> None:
        """Close the file without flushing it. Safe to call twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self, path: Path) -> None:
        if self._descriptor >= 0:
            return
        self._new_name = self._new_name or not path.exists()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)

    def _write_fully(self, head: bytes, payload: bytes, offset: int) -> None:
        written = os.pwritev(self._descriptor, (head, payload), offset)
        length = len(head) + len(payload)
        if written == length:
            return
        rest = memoryview(head + payload)  # short writes happen at 2 GiB and on a nearly full disk
        while written < length:
            written += os.pwrite(self._descriptor, rest[written:], offset + written)

    def _truncate(self, end: int) -> None:
        if self._descriptor >= 0:
            path = segment_path(self._run_dir, self.segment)
            with storage_errors(path, f"cut back to {end:,} bytes"):
                os.ftruncate(self._descriptor, end)

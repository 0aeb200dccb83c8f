"""One request of the embedded engine: its tokens, where its keys are, and how it ends."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np

from posttrain.types import Completion, Int32, SamplingParams


@dataclass(eq=False)
class Sequence:
    """A prompt and what was sampled after it.

    `ids[:length]` are all tokens known so far. The keys of `ids[:num_cached]` are in `blocks`;
    while it runs, that is all but the newest token. `keys_version` is the policy version under
    which all of them were computed, None when there were several.
    """

    ids: Int32
    prompt_length: int
    params: SamplingParams
    uniforms: np.ndarray
    future: asyncio.Future[Completion]
    max_tokens: int
    limited_by_context: bool
    length: int
    blocks: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)
    num_cached: int = 0
    keys_version: int | None = None
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def token_ids(self) -> Int32:
        """What was sampled."""
        return self.ids[self.prompt_length : self.length]

    @property
    def num_sampled(self) -> int:
        return self.length - self.prompt_length

    @property
    def next_uniform(self) -> float:
        return float(self.uniforms[self.num_sampled])

    def append(self, token: int, logprob: float, version: int) -> None:
        """One more sampled token."""
        self.ids[self.length] = token
        self.length += 1
        self.logprobs.append(logprob)
        self.versions.append(version)

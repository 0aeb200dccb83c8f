"""A policy of one table: after token i comes token next[i], and every token has its own bytes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from posttrain.sampling.embedded import EmbeddedSampler
from posttrain.types import Completion, SamplingParams


class TablePolicy:
    """What `EmbeddedSampler` needs of a policy; token i is `pieces[i]`, its successor i + 1."""

    num_layers = 1
    dtype = torch.float32

    def __init__(
        self, pieces: Sequence[str | bytes], eos: Sequence[int] = (), max_context: int = 100
    ) -> None:
        self._pieces = [p.encode() if isinstance(p, str) else p for p in pieces]
        self.vocab_size = len(pieces)
        self.eos_token_ids = tuple(eos)
        self.max_context = max_context
        self.rows_at_once: list[int] = []
        self.fails_at: int | None = None
        self.lock = threading.Lock()

    def hidden(
        self, token_ids: torch.Tensor, positions: torch.Tensor, make_layout: Callable[[int], Any]
    ) -> torch.Tensor:
        self.rows_at_once.append(len(token_ids))
        if self.fails_at is not None and len(self.rows_at_once) > self.fails_at:
            raise RuntimeError("the kernel failed")
        return torch.nn.functional.one_hot(
            (token_ids + 1) % self.vocab_size, self.vocab_size
        ).float()

    def sampling_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return (hidden - 1) * 1e9

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(self._pieces[i] for i in token_ids).decode("utf-8", errors="replace")


@pytest.fixture
def table() -> type[TablePolicy]:
    return TablePolicy


@pytest.fixture
def complete() -> Callable[..., Completion]:
    """One completion of a table policy."""

    def run(policy: Any, prompt: Sequence[int], **params: Any) -> Completion:
        params = {"max_tokens": 50} | params
        sampler = EmbeddedSampler(policy, max_batch=2)
        ids = np.asarray(prompt, np.int32)
        return asyncio.run(sampler.generate(ids, SamplingParams(**params), seed=0))

    return run

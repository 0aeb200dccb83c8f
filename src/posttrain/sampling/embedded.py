"""The embedded engine: batched decoding with a KV cache on the learner's own weights.

Requests join and leave a running batch between two tokens. What prompts share is computed once.
A request's tokens and log-probs are a function of its ids, params, seed and the weights.

    generate()  consumes a request; waits for its completion; unblocked by `_run`
    _run()      consumes waiting requests; produces completions; ends when nothing is left
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from posttrain.data.prefix_tree import GrowingTree, PrefixTree
from posttrain.errors import EngineError
from posttrain.randomness import generator
from posttrain.sampling.choose import choose_tokens
from posttrain.training import attention
from posttrain.training.policy import Policy
from posttrain.types import Completion, FinishReason, Int32, SamplingParams

PREFILL_ROWS = 4096


@dataclass(eq=False)
class _Request:
    prompt: Int32
    params: SamplingParams
    uniforms: np.ndarray
    future: asyncio.Future[Completion]
    max_tokens: int
    limited_by_context: bool
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Position of the newest token, the one to feed next."""
        return len(self.prompt) + len(self.token_ids) - 1


class EmbeddedSampler:
    """Implements `protocols.Sampler`. Runs on the event loop's thread, one token per turn of it."""

    def __init__(self, policy: Policy, *, max_batch: int, version: int = 0) -> None:
        self._policy = policy
        self._max_batch = max_batch
        self._version = version
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._cache = self._empty_cache()
        self._driver: asyncio.Task[None] | None = None
        self._busy_s = 0.0
        self._sampled = 0
        self._prefilled = 0

    async def generate(self, token_ids: Int32, params: SamplingParams, seed: int) -> Completion:
        """One completion. Raises EngineError for an empty prompt, one that fills the context, or
        ids outside the vocabulary."""
        room = self._policy.max_context - len(token_ids)
        if len(token_ids) == 0 or room < 1:
            raise EngineError(
                f"a prompt of {len(token_ids)} tokens cannot be continued in a context of "
                f"{self._policy.max_context}; shorten it or raise model.max_context"
            )
        if token_ids.min() < 0 or token_ids.max() >= self._policy.vocab_size:
            raise EngineError(
                f"token ids span {token_ids.min()}..{token_ids.max()}, outside the vocabulary of "
                f"{self._policy.vocab_size}; the tokenizer is not this model's"
            )
        limit = min(params.max_tokens, room)
        request = _Request(
            prompt=token_ids,
            params=params,
            uniforms=generator(seed).random(limit),
            future=asyncio.get_running_loop().create_future(),
            max_tokens=limit,
            limited_by_context=room < params.max_tokens,
        )
        self._waiting.append(request)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._run())
        try:
            return await request.future
        finally:
            if not request.future.done() or request.future.cancelled():
                self._forget(request)

    async def load_weights(self, version: int) -> None:
        """The learner's weights are these weights; only the label of new tokens changes.

        Running sequences go on with keys computed by the old weights; their tokens say so.
        """
        self._version = version

    async def abort(self) -> None:
        for request in [*self._running, *self._waiting]:
            self._finish(request, FinishReason.ABORT)
        self._running.clear()
        self._waiting.clear()

    def stats(self) -> Mapping[str, float]:
        """`sampler/*` since the last call."""
        busy, sampled, prefilled = self._busy_s, self._sampled, self._prefilled
        self._busy_s, self._sampled, self._prefilled = 0.0, 0, 0
        return {
            "sampler/busy_s": busy,
            "sampler/tokens": float(sampled),
            "sampler/prefill_tokens": float(prefilled),
            "sampler/tok_per_s": sampled / busy if busy else 0.0,
        }

    async def _run(self) -> None:
        try:
            while self._running or self._waiting:
                started = time.perf_counter()
                with torch.no_grad():
                    self._admit()
                    self._decode()
                self._busy_s += time.perf_counter() - started
                await asyncio.sleep(0)  # let finished requests' owners act and new ones arrive
        except Exception as error:  # boundary: every owner gets the engine's failure
            for request in [*self._running, *self._waiting]:
                if not request.future.done():
                    failure = EngineError(f"embedded engine: {type(error).__name__}: {error}")
                    failure.__cause__ = error
                    request.future.set_exception(failure)
            self._running.clear()
            self._waiting.clear()
            self._cache = self._empty_cache()  # masked keys that are NaN would still spread

    def _empty_cache(self) -> attention.KVCache:
        return attention.KVCache(self._policy.num_layers, self._max_batch)

    def _admit(self) -> None:
        """Prefill waiting requests while rows are free; what prompts share is computed once."""
        while self._waiting and len(self._running) < self._max_batch:
            joining: list[_Request] = []
            tree = GrowingTree()
            while self._waiting and len(self._running) + len(joining) < self._max_batch:
                new_rows = tree.new_rows(self._waiting[0].prompt)
                if joining and tree.num_rows + new_rows > PREFILL_ROWS:
                    break
                tree.add(self._waiting[0].prompt)
                joining.append(self._waiting.popleft())
            self._prefill(joining, tree.freeze())

    def _prefill(self, joining: list[_Request], tree: PrefixTree) -> None:
        sink = self._cache_sink(tree)
        self._running.extend(joining)  # from here on a failure reaches their owners
        hidden = self._policy.hidden(
            torch.from_numpy(tree.token_ids),
            torch.from_numpy(tree.position_ids),
            lambda rows: attention.TreeLayout(tree.paths, tree.first_owned, rows, kv_sink=sink),
        )
        last = np.asarray([path[-1] for path in tree.paths])
        distinct, owner = np.unique(last, return_inverse=True)
        logits = self._policy.logits(hidden[torch.from_numpy(distinct)])
        self._prefilled += tree.num_rows
        self._take(joining, logits[torch.from_numpy(owner)])

    def _cache_sink(self, tree: PrefixTree) -> attention.KVSink:
        """Where prefill's keys go: the path of each request into its row of the cache."""
        first = len(self._running)
        source = torch.from_numpy(np.concatenate(tree.paths))
        lengths = [len(path) for path in tree.paths]
        row = torch.from_numpy(np.repeat(np.arange(first, first + len(lengths)), lengths))
        position = torch.from_numpy(np.concatenate([np.arange(n) for n in lengths]))
        capacity = max(lengths) + 1

        def sink(layer: int, key_TKD: torch.Tensor, value_TKD: torch.Tensor) -> None:
            self._cache.write(layer, row, position, key_TKD[source], value_TKD[source], capacity)

        return sink

    def _decode(self) -> None:
        if not self._running:
            return
        running = list(self._running)
        ids = torch.tensor([r.token_ids[-1] for r in running])
        positions = [r.position for r in running]
        layout = attention.DecodeLayout(self._cache, positions)
        hidden = self._policy.hidden(ids, torch.tensor(positions), lambda _: layout)
        self._take(running, self._policy.logits(hidden))

    def _take(self, requests: list[_Request], logits_NV: torch.Tensor) -> None:
        """Sample a token for each, then let the finished ones go."""
        uniforms = [float(r.uniforms[len(r.token_ids)]) for r in requests]
        ids, logprobs = choose_tokens(logits_NV, [r.params for r in requests], uniforms)
        for request, token, logprob in zip(requests, ids, logprobs, strict=True):
            request.token_ids.append(token)
            request.logprobs.append(logprob)
            request.versions.append(self._version)
        self._sampled += len(requests)
        for request in requests:
            reason = self._finish_reason(request)
            if reason is not None:
                self._release(request)
                self._finish(request, reason)

    def _finish_reason(self, request: _Request) -> FinishReason | None:
        if request.token_ids[-1] in self._policy.eos_token_ids and not request.params.ignore_eos:
            return FinishReason.EOS
        if request.params.stop and self._matched_stop(request):
            return FinishReason.STOP_STRING
        if len(request.token_ids) >= request.max_tokens:
            return FinishReason.CONTEXT if request.limited_by_context else FinishReason.LENGTH
        return None

    def _matched_stop(self, request: _Request) -> bool:
        longest = max(len(s.encode()) for s in request.params.stop)
        tail = self._policy.decode(request.token_ids[-(longest + 8) :])
        return any(s in tail for s in request.params.stop)

    def _release(self, request: _Request) -> None:
        """Free the request's row: the last running row moves into its place."""
        row = self._running.index(request)
        last = self._running.pop()
        if last is not request:
            self._cache.move(len(self._running), row)
            self._running[row] = last

    def _finish(self, request: _Request, reason: FinishReason) -> None:
        if request.future.done():
            return
        ids = request.token_ids
        text = self._policy.decode(ids[:-1] if reason is FinishReason.EOS else ids)
        if reason is FinishReason.STOP_STRING:
            found = [text.find(s) for s in request.params.stop]
            text = text[: min((i for i in found if i >= 0), default=len(text))]
        request.future.set_result(
            Completion.build(ids, request.logprobs, request.versions, reason, text)
        )

    def _forget(self, request: _Request) -> None:
        """Its owner was cancelled: stop spending work on it."""
        if request in self._waiting:
            self._waiting.remove(request)
        elif request in self._running:
            self._release(request)

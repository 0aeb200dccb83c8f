"""The embedded engine: batched decoding on the learner's own weights.

Requests join and leave a running batch between two tokens. What prompts share is computed once, and
what earlier requests computed under the same weights is not computed again. A request's tokens and
log-probs are a function of its ids, params, seed and the weights.

    generate()  consumes a request; waits for its completion; unblocked by `_run`
    _run()      consumes waiting requests; produces completions; ends when nothing is left

Every step runs on the event loop's thread, and between two steps everything else that is ready
does: environments, graders, new requests. (A thread of its own would give way to theirs at each
torch operation: Python lets one thread run at a time.)
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from itertools import islice

import numpy as np
import torch

from posttrain.errors import EngineError
from posttrain.randomness import generator
from posttrain.sampling.blocks import BlockStore, block_keys
from posttrain.sampling.choose import choose_tokens
from posttrain.sampling.prefill import Prefill, tables_of
from posttrain.sampling.sequence import Sequence
from posttrain.telemetry.spans import span
from posttrain.training.paged import BLOCK, KVPool, PagedLayout
from posttrain.training.policy import Policy
from posttrain.types import Completion, FinishReason, Int32, SamplingParams

PREFILL_ROWS = 2048
"""Rows of prompts computed between two tokens of those that run."""


TRACK = "engine"
"""Of a profile."""


class EmbeddedSampler:
    """Implements `protocols.Sampler`."""

    def __init__(
        self, policy: Policy, *, max_batch: int, kv_tokens: int | None = None, version: int = 0
    ) -> None:
        """At most `max_batch` sequences run together, and keys of `kv_tokens` tokens are held, by
        default as many as that many sequences need at most."""
        self._policy = policy
        self._max_batch = max_batch
        self._version = version
        tokens = max_batch * policy.max_context if kv_tokens is None else kv_tokens
        self._store = BlockStore(-(-tokens // BLOCK))
        self._pool = KVPool(policy.num_layers, self._store.num_blocks)
        self._waiting: deque[Sequence] = deque()
        self._prefill: Prefill | None = None
        self._running: list[Sequence] = []
        self._tables = np.zeros((0, 0), np.int32)
        self._tables_changed = True
        self._driver: asyncio.Task[None] | None = None
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._counts = _Counts()

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys are held at most."""
        return self._store.num_blocks * BLOCK

    async def generate(self, token_ids: Int32, params: SamplingParams, seed: int) -> Completion:
        """One completion. Raises EngineError for an empty prompt, one that fills the context or
        the engine's memory, or ids outside the vocabulary."""
        limit, limited_by_context = self._room(token_ids, params)
        ids = np.empty(len(token_ids) + limit, np.int32)
        ids[: len(token_ids)] = token_ids
        sequence = Sequence(
            ids=ids,
            prompt_length=len(token_ids),
            params=params,
            uniforms=generator(seed).random(limit),
            future=asyncio.get_running_loop().create_future(),
            max_tokens=limit,
            limited_by_context=limited_by_context,
            length=len(token_ids),
        )
        self._waiting.append(sequence)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._run())
        try:
            return await sequence.future
        finally:
            if not sequence.future.done() or sequence.future.cancelled():
                self._forget(sequence)

    async def load_weights(self, version: int) -> None:
        """The learner's weights are these weights; what was cached under others is dropped.

        Running sequences go on with keys computed by the old weights; their tokens say so, and no
        later prompt will read them. Prompts that are half computed begin again: a state of the old
        weights under the new output head would be a token of neither.
        """
        self._version = version
        self._store.forget_all()
        for sequence in self._running:
            sequence.keys_version = None
        self._give_up_prefill()

    async def pause(self) -> None:
        """Nothing is computed until `resume`, and nothing is lost."""
        self._may_run.clear()

    async def resume(self) -> None:
        """Go on where `pause` stopped."""
        self._may_run.set()

    async def abort(self) -> None:
        for sequence in self._everything():
            self._finish(sequence, FinishReason.ABORT)
            self._store.release(sequence.blocks)
        self._clear()

    def stats(self) -> Mapping[str, float]:
        """`sampler/*` since the last call."""
        counts, self._counts = self._counts, _Counts()
        return {
            "sampler/busy_s": counts.busy_s,
            "sampler/tokens": float(counts.sampled),
            "sampler/prefill_tokens": float(counts.prefilled),
            "sampler/cached_tokens": float(counts.cached),
            "sampler/preemptions": float(counts.preempted),
            "sampler/waiting_max": float(counts.waiting_max),
            "sampler/kv_frac": counts.blocks_max / self._store.num_blocks,
            "sampler/tok_per_s": counts.sampled / counts.busy_s if counts.busy_s else 0.0,
        }

    # --- the batch --------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while self._running or self._waiting or self._prefill:
                await self._may_run.wait()
                self._step()
                await asyncio.sleep(0)  # let finished requests' owners act and new ones arrive
        except Exception as error:  # boundary: every owner gets the engine's failure
            for sequence in self._everything():
                if not sequence.future.done():
                    failure = EngineError(f"embedded engine: {type(error).__name__}: {error}")
                    failure.__cause__ = error
                    sequence.future.set_exception(failure)
            self._clear()
            self._store = BlockStore(self._store.num_blocks)  # whatever was half done is gone
            self._pool.clear()  # masked keys that are NaN would still spread

    def _step(self) -> None:
        """A piece of the prompts that wait, and a token for each sequence that runs."""
        started = time.perf_counter()
        with self._policy.lock, torch.no_grad():
            if self._prefill is None:
                self._prefill = self._admitted()
            if self._prefill is not None:
                with span("prefill", TRACK, rows=self._prefill.num_rows):
                    self._compute_prompts(self._prefill)
            with span("decode", TRACK, requests=len(self._running)):
                self._decode()
        counts = self._counts
        counts.busy_s += time.perf_counter() - started
        counts.waiting_max = max(counts.waiting_max, len(self._waiting))
        counts.blocks_max = max(counts.blocks_max, self._store.num_in_use)

    def _admitted(self) -> Prefill | None:
        """Those of the waiting, in order, for which there are rows and blocks."""
        joining: list[Sequence] = []
        new_blocks: set[bytes] = set()  # those who join share what is full
        for sequence in islice(self._waiting, self._max_batch - len(self._running)):
            self._take_cached(sequence)
            new_blocks.update(sequence.block_keys[len(sequence.blocks) :])
            ends = len(self._running) + len(joining) + 1  # each may soon need one of its own
            if len(new_blocks) + ends > self._store.num_available and (joining or self._running):
                self._give_up_blocks(sequence)  # they wait for what is running
                break
            joining.append(sequence)
        if not joining:
            return None
        prefill = Prefill(joining, self._store)
        for sequence in joining:
            self._waiting.popleft()
            self._counts.cached += sequence.num_cached
        return prefill

    def _take_cached(self, sequence: Sequence) -> None:
        """The longest beginning that was computed under these weights. The last token is left to
        compute: its state gives the next one."""
        known = sequence.block_keys if sequence.keys_version == self._version else ()
        ids = sequence.ids[: sequence.length]
        sequence.block_keys = block_keys(self._version, ids, known)
        sequence.keys_version = self._version
        usable = sequence.block_keys[: (sequence.length - 1) // BLOCK]
        sequence.blocks = self._store.find(usable)
        self._store.share(sequence.blocks)
        sequence.num_cached = len(sequence.blocks) * BLOCK

    def _give_up_blocks(self, sequence: Sequence) -> None:
        self._store.release(sequence.blocks)
        sequence.blocks, sequence.num_cached = [], 0

    def _give_up_prefill(self) -> None:
        """Those who are joining wait again, in their order, before all others."""
        if self._prefill is None:
            return
        for sequence in reversed(self._prefill.members):
            self._give_up_blocks(sequence)
            if not sequence.future.done():
                self._waiting.appendleft(sequence)
        self._prefill = None

    def _compute_prompts(self, prefill: Prefill) -> None:
        self._counts.prefilled += prefill.step(self._policy, self._pool, PREFILL_ROWS)
        if not prefill.done:
            return
        self._prefill = None
        for sequence in prefill.members:
            sequence.num_cached = sequence.length
            self._keep_blocks(sequence)
        alive = [s for s in prefill.members if not s.future.done()]
        for sequence in prefill.members:
            if sequence.future.done():  # its owner left meanwhile
                self._store.release(sequence.blocks)
        self._running.extend(alive)
        self._tables_changed = True
        if alive:
            hidden, owner = prefill.last_hidden()
            rows = [i for i, s in enumerate(prefill.members) if not s.future.done()]
            logits = self._policy.sampling_logits(hidden)
            self._take(alive, logits[owner[rows]])

    def _decode(self) -> None:
        self._make_room()
        if not self._running:
            return
        running = self._running
        if self._tables_changed:
            self._tables = tables_of(running)
            self._tables_changed = False
        positions = np.asarray([s.length - 1 for s in running], np.int32)
        rows = np.arange(len(running), dtype=np.int32)
        slots = self._tables[rows, positions // BLOCK] * BLOCK + positions % BLOCK
        layout = PagedLayout(self._pool, self._tables, rows, positions, slots)
        ids = torch.tensor([int(s.ids[s.length - 1]) for s in running])
        hidden = self._policy.hidden(
            ids, torch.from_numpy(positions.astype(np.int64)), lambda _: layout
        )
        for sequence in running:
            sequence.num_cached = sequence.length
        self._take(list(running), self._policy.sampling_logits(hidden))

    def _make_room(self) -> None:
        """A block for each sequence whose newest token begins one. When there are no more, the
        sequence that came last waits again: its tokens stay, its keys are computed anew."""
        for sequence in [s for s in self._running if s.length > len(s.blocks) * BLOCK]:
            if sequence not in self._running:
                continue  # it had to give way
            while (block := self._store.allocate()) is None:
                youngest = self._running[-1]
                self._preempt(youngest)
                if youngest is sequence:
                    break
            else:
                sequence.blocks.append(block)
                self._tables_changed = True

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        sequence.blocks, sequence.num_cached = [], 0
        self._waiting.appendleft(sequence)
        self._counts.preempted += 1

    def _take(self, sequences: list[Sequence], logits_NV: torch.Tensor) -> None:
        """Sample a token for each, then let the finished ones go."""
        uniforms = [s.next_uniform for s in sequences]
        ids, logprobs = choose_tokens(logits_NV, [s.params for s in sequences], uniforms)
        self._counts.sampled += len(sequences)
        for sequence, token, logprob in zip(sequences, ids, logprobs, strict=True):
            sequence.append(token, logprob, self._version)
            reason = self._finish_reason(sequence)
            if reason is not None:
                self._leave(sequence)
                self._finish(sequence, reason)

    def _leave(self, sequence: Sequence) -> None:
        """Out of the batch; its full blocks stay for prompts that go on from it."""
        self._running.remove(sequence)
        self._tables_changed = True
        self._keep_blocks(sequence)
        self._store.release(sequence.blocks)

    def _keep_blocks(self, sequence: Sequence) -> None:
        """Unless some keys are of other weights."""
        if sequence.keys_version != self._version:
            return
        known = sequence.block_keys
        keys = block_keys(self._version, sequence.ids[: sequence.num_cached], known)
        sequence.block_keys = keys
        full = sequence.num_cached // BLOCK
        self._store.keep(sequence.blocks[:full], keys[:full])

    # --- beginning and end ------------------------------------------------------------------------

    def _room(self, token_ids: Int32, params: SamplingParams) -> tuple[int, bool]:
        """How many tokens may be sampled, and whether the context is why there are not more."""
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
        most = self._store.num_blocks * BLOCK
        if len(token_ids) + limit > most:
            raise EngineError(
                f"a prompt of {len(token_ids)} tokens and {limit} new ones do not fit into "
                f"sampler.kv_tokens {most}; raise it, or lower sampler.max_tokens"
            )
        return limit, room < params.max_tokens

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        params, newest = sequence.params, int(sequence.ids[sequence.length - 1])
        if newest in self._policy.eos_token_ids and not params.ignore_eos:
            return FinishReason.EOS
        if params.stop and self._matched_stop(sequence):
            return FinishReason.STOP_STRING
        if sequence.num_sampled >= sequence.max_tokens:
            return FinishReason.CONTEXT if sequence.limited_by_context else FinishReason.LENGTH
        return None

    def _matched_stop(self, sequence: Sequence) -> bool:
        longest = max(len(s.encode()) for s in sequence.params.stop)
        tail = self._policy.decode(sequence.token_ids[-(longest + 8) :].tolist())
        return any(s in tail for s in sequence.params.stop)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.future.done():
            return
        ids = sequence.token_ids.tolist()
        text = self._policy.decode(ids[:-1] if reason is FinishReason.EOS else ids)
        if reason is FinishReason.STOP_STRING:
            found = [text.find(s) for s in sequence.params.stop]
            text = text[: min((i for i in found if i >= 0), default=len(text))]
        sequence.future.set_result(
            Completion.build(ids, sequence.logprobs, sequence.versions, reason, text)
        )

    def _forget(self, sequence: Sequence) -> None:
        """Its owner was cancelled: stop spending work on it. One in the middle of its prefill
        leaves when that ends, or when nobody else is in it."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif sequence in self._running:
            self._leave(sequence)
        elif self._prefill and all(s.future.done() for s in self._prefill.members):
            self._give_up_prefill()

    def _everything(self) -> list[Sequence]:
        joining = self._prefill.members if self._prefill else []
        return [*self._running, *joining, *self._waiting]

    def _clear(self) -> None:
        self._prefill = None
        self._running.clear()
        self._waiting.clear()
        self._tables_changed = True


class _Counts:
    """Since the last `stats`."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.sampled = self.prefilled = self.cached = self.preempted = 0
        self.waiting_max = self.blocks_max = 0

"""Blocks are never lost, never given twice, and found only for what they hold."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.sampling.blocks import BlockStore, block_keys
from posttrain.training.paged import BLOCK


def test_a_key_covers_the_version_and_everything_before() -> None:
    ids = np.arange(3 * BLOCK, dtype=np.int32)
    keys = block_keys(1, ids)
    assert len(keys) == 3 and len(set(keys)) == 3
    assert block_keys(1, ids[: 2 * BLOCK + 5]) == keys[:2]
    assert block_keys(2, ids)[0] != keys[0]
    other = ids.copy()
    other[0] += 1
    assert not set(block_keys(1, other)) & set(keys), "an early token changes every later key"
    assert block_keys(1, ids, known=keys[:1]) == keys


def test_the_least_recently_used_block_goes_first_and_ends_go_before_beginnings() -> None:
    store = BlockStore(4)
    chains = []
    for start in (0, 100):
        blocks = [store.allocate(), store.allocate()]
        keys = block_keys(0, np.arange(start, start + 2 * BLOCK, dtype=np.int32))
        store.keep(blocks, keys)  # type: ignore[arg-type]
        store.release(blocks)  # type: ignore[arg-type]
        chains.append((blocks, keys))
    assert store.num_available == 4 and store.num_kept == 4
    assert store.allocate() == chains[0][0][1], "the end of the older chain"
    assert store.find(chains[0][1]) == chains[0][0][:1]
    assert store.find(chains[1][1]) == chains[1][0]


def test_a_block_in_use_is_not_given_away() -> None:
    store = BlockStore(2)
    first, second = store.allocate(), store.allocate()
    assert {first, second} == {0, 1} and store.allocate() is None


class Model:
    """The store beside a plain account of who uses what."""

    def __init__(self) -> None:
        self.store = BlockStore(6)
        self.version = 0
        self.users: list[tuple[int, np.ndarray, list[int]]] = []

    def begin(self, text: int, length: int) -> None:
        """As the engine does: cached blocks are shared, the rest allocated and made known."""
        ids = (np.arange(length * BLOCK) // BLOCK % 3 + 10 * text).astype(np.int32)
        keys = block_keys(self.version, ids)
        blocks = self.store.find(keys)
        for block, key in zip(blocks, keys, strict=False):
            assert self.holds[block] == (self.version, key), "found what it does not hold"
        self.store.share(blocks)
        while len(blocks) < length:
            block = self.store.allocate()
            if block is None:
                self.store.release(blocks)
                return
            assert all(block not in used for _, _, used in self.users), "given twice"
            self.holds[block] = (self.version, keys[len(blocks)])
            blocks.append(block)
        self.store.keep(blocks, keys)
        self.users.append((self.version, ids, blocks))

    @property
    def holds(self) -> dict[int, tuple[int, bytes]]:
        return self.__dict__.setdefault("_holds", {})

    def check(self) -> None:
        used = {block for _, _, blocks in self.users for block in blocks}
        assert self.store.num_in_use == len(used)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("begin"), st.integers(0, 2), st.integers(1, 4)),
            st.tuples(st.just("end"), st.integers(0, 9), st.just(0)),
            st.tuples(st.just("version"), st.just(0), st.just(0)),
        ),
        max_size=40,
    )
)
def test_any_schedule_keeps_the_account(actions: list[tuple[str, int, int]]) -> None:
    model = Model()
    for what, a, b in actions:
        if what == "begin":
            model.begin(a, b)
        elif what == "version":
            model.version += 1
            model.store.forget_all()
        elif model.users:
            _, _, blocks = model.users.pop(a % len(model.users))
            model.store.release(blocks)
        model.check()
    for _, _, blocks in model.users:
        model.store.release(blocks)
    assert model.store.num_available == 6

"""Blocks and the prefix index by themselves."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.engines.serve.scheduling.blocks import BlockManager
from fivefold.engines.serve.scheduling.errors import SchedulingError
from fivefold.engines.serve.scheduling.prefix import PrefixIndex


def cached(blocks: BlockManager, index: PrefixIndex, tokens: list[int], salt: bytes) -> list[int]:
    """Put the full blocks of the tokens into the index, and own none of them."""
    keys = index.extend([], tokens, salt)
    table = [blocks.allocate() for _ in keys]
    for key, block in zip(keys, table, strict=True):
        index.insert(key, block)
    held = list(table)
    blocks.release(table)
    return held


def test_blocks_go_out_and_come_back() -> None:
    blocks = BlockManager(3, 4)
    table = [blocks.allocate() for _ in range(3)]
    assert sorted(table) == [0, 1, 2] and blocks.available == 0 and blocks.owned_count == 3
    blocks.invariants([table])
    blocks.release(table)
    assert table == [] and blocks.free_count == 3
    blocks.invariants([])


def test_a_fork_is_copied_when_it_is_written() -> None:
    blocks = BlockManager(3, 4)
    first = [blocks.allocate(), blocks.allocate()]
    second = blocks.fork(first)
    blocks.invariants([first, second])
    source, destination = blocks.make_private(second, 1)
    assert source == first[1] and destination == second[1] != source
    assert [blocks.count(b) for b in (first[0], source, destination)] == [2, 1, 1]
    blocks.invariants([first, second])


def test_the_block_released_longest_ago_is_evicted_and_the_end_of_a_prefix_before_its_beginning() -> (
    None
):
    blocks = BlockManager(4, 2)
    index = PrefixIndex(blocks)
    old = cached(blocks, index, [1, 2, 3, 4], b"")
    new = cached(blocks, index, [5, 6, 7, 8], b"")
    assert blocks.cached_count == 4 and blocks.free_count == 0
    for block in index.match([1, 2, 3, 4, 5]):  # used again: now the newest
        blocks.share(block)
    blocks.release(list(old))
    assert [blocks.allocate() for _ in range(4)] == [new[1], new[0], old[1], old[0]]
    assert len(index) == 0


def test_the_last_token_is_never_matched() -> None:
    blocks = BlockManager(4, 2)
    index = PrefixIndex(blocks)
    held = cached(blocks, index, [1, 2, 3, 4], b"")
    assert index.match([1, 2, 3, 4]) == held[:1]
    assert index.match([1, 2, 3, 4, 9]) == held
    assert index.match([1, 2]) == []
    assert index.match([1]) == []
    assert index.match([1, 3, 3, 4, 9]) == []
    assert index.match([3, 4, 9]) == []  # the block is there, behind other tokens


def test_salt_and_version_keep_prefixes_apart() -> None:
    blocks = BlockManager(8, 2)
    index = PrefixIndex(blocks, b"1")
    tokens = [1, 2, 3, 4, 5]
    ours, theirs = cached(blocks, index, tokens, b"a"), cached(blocks, index, tokens, b"b")
    assert index.match(tokens, b"a") == ours and index.match(tokens, b"b") == theirs
    assert index.match(tokens) == []
    before = index.extend([], tokens, b"a")
    index.clear(b"2")
    assert len(index) == 0 and blocks.free_count == 8
    after = index.extend([], tokens, b"a")
    assert not set(before) & set(after)
    index.clear(b"")  # version and salt do not run into each other
    empty = index.extend([], tokens, b"xa")
    index.clear(b"x")
    assert index.extend([], tokens, b"a") != empty


def test_of_two_blocks_with_one_key_the_first_stays() -> None:
    blocks = BlockManager(2, 1)
    index = PrefixIndex(blocks)
    key = index.extend([], [7], b"")[0]
    first, second = [blocks.allocate()], [blocks.allocate()]
    index.insert(key, first[0])
    index.insert(key, second[0])
    assert index.match([7, 7]) == first
    blocks.release(second)
    assert blocks.free_count == 1
    index.invariants()


def test_clearing_leaves_blocks_with_their_owners() -> None:
    blocks = BlockManager(2, 1)
    index = PrefixIndex(blocks)
    table = [blocks.allocate()]
    index.insert(index.extend([], [7], b"")[0], table[0])
    index.clear()
    assert blocks.owned_count == 1 and index.match([7, 7]) == []
    blocks.release(table)
    assert blocks.free_count == 2
    blocks.invariants([])


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.lists(st.integers(0, 2), max_size=24), st.integers(1, 5), st.data())
def test_keys_in_steps_are_keys_at_once(tokens: list[int], size: int, data: st.DataObject) -> None:
    index = PrefixIndex(BlockManager(1, size))
    keys: list[bytes] = []
    whole = len(tokens) // size
    for count in sorted(data.draw(st.lists(st.integers(0, whole), max_size=4))):
        index.extend(keys, tokens, b"s", count)
    assert index.extend(keys, tokens, b"s") == index.extend([], tokens, b"s")
    assert len(set(keys)) == len(keys) == whole


def test_blocks_under_a_random_load() -> None:
    chance = random.Random(0)
    blocks = BlockManager(7, 2)
    index = PrefixIndex(blocks)
    tables: list[list[int]] = []
    for _ in range(3000):
        what = chance.randrange(5)
        if what == 0 and blocks.available:
            tables.append([blocks.allocate()])
        elif what == 1 and tables:
            tables.append(blocks.fork(chance.choice(tables)))
        elif what == 2 and tables:
            blocks.release(tables.pop(chance.randrange(len(tables))))
        elif what == 3 and tables and blocks.available:
            table = chance.choice(tables)
            if blocks.count(table[0]) > 1:
                blocks.make_private(table, 0)
        elif what == 4 and tables:
            block = chance.choice(tables)[0]
            if not blocks.is_named(block):
                index.insert(chance.randbytes(16), block)
        tables = tables[-12:] if len(tables) <= 12 else tables
        while len(tables) > 12:
            blocks.release(tables.pop(0))
        blocks.invariants(tables)
        index.invariants()


@pytest.mark.parametrize("value", [0, -1, 2.0, True, None])
@pytest.mark.parametrize("name", ["num_blocks", "block_size"])
def test_sizes_that_are_none(name: str, value: object) -> None:
    sizes = {"num_blocks": 4, "block_size": 4, name: value}
    with pytest.raises(SchedulingError) as error:
        BlockManager(**sizes)  # type: ignore[arg-type]
    assert str(error.value) == f"{name}={value!r}; {name} must be at least 1"


def test_misuse_of_blocks() -> None:
    blocks = BlockManager(1, 4)
    with pytest.raises(SchedulingError, match=r"^block 0 is free; allocate it$"):
        blocks.share(0)
    with pytest.raises(SchedulingError, match=r"^block 0 is not owned; release a block once"):
        blocks.release([0])
    with pytest.raises(SchedulingError, match=r"^block 0 is not owned; name it while"):
        blocks.name(0)
    table = [blocks.allocate()]
    with pytest.raises(SchedulingError, match=r"^all 1 blocks of the cache are owned; preempt"):
        blocks.allocate()
    with pytest.raises(SchedulingError, match=r"^block 0 is not shared; write to it as it is$"):
        blocks.make_private(table, 0)


def test_invariants_name_what_is_broken() -> None:
    blocks = BlockManager(2, 4)
    table = [blocks.allocate()]
    with pytest.raises(AssertionError, match="block 0 is in 0 tables, its count is 1"):
        blocks.invariants([])
    with pytest.raises(AssertionError, match="block 0 is in 2 tables, its count is 1"):
        blocks.invariants([table, table])
    blocks._free.append(0)
    with pytest.raises(AssertionError, match="block 0 is in 2 states"):
        blocks.invariants([table])

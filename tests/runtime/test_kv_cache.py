"""Blocks: free + used + cached == total, whatever happens."""

import random

import pytest

from llmc.runtime import prefix_cache
from llmc.runtime.kv_cache import BlockTable, KvCache, StatePool
from llmc.runtime.prefix_cache import Content, child, root


def content(number: int) -> Content:
    """Another object each time, as another sequence has it."""
    return child(child(root("engine", "", ""), (7,) * 16), (number,) * 16)


def test_blocks_come_and_go() -> None:
    cache = KvCache(4, 16)
    assert [cache.blocks_for(n) for n in (0, 1, 16, 17, 64)] == [0, 1, 1, 2, 4]
    a = cache.allocate(3)
    assert (cache.num_free, cache.num_used, cache.num_cached) == (1, 3, 0)
    cache.share(a[:2])
    cache.release(a)
    assert (cache.num_free, cache.num_used) == (2, 2)
    cache.check([a[:2]])
    cache.release(a[:2])
    assert cache.num_free == 4
    with pytest.raises(AssertionError, match="5 blocks asked for, 4 available"):
        cache.allocate(5)
    with pytest.raises(AssertionError, match="released once too often"):
        cache.release(a[:1])


def test_named_blocks_are_cached_and_evicted_oldest_first() -> None:
    cache = KvCache(3, 16)
    blocks = cache.allocate(3)
    names = [cache.name(block, content(number)) for number, block in enumerate(blocks)]
    cache.name(blocks[0], content(9))  # has a name already
    assert cache.name(blocks[1], content(0)) is names[0]  # that is the name of another
    cache.release(blocks)  # the end of the sequence first
    assert (cache.num_free, cache.num_used, cache.num_cached) == (0, 0, 3)
    assert cache.find(content(0)) == (blocks[0], names[0])
    assert cache.can_share(blocks[:1], 3)
    assert not cache.can_share(blocks[:1], 4)
    cache.share(blocks[:1])
    cache.check([blocks[:1]])
    new = cache.allocate(1)
    assert new == [blocks[2]]
    assert cache.find(content(2)) is None
    assert cache.find(content(1)) == (blocks[1], names[1])
    assert cache.find(content(9)) is None
    cache.forget(blocks[:2])
    assert cache.find(content(0)) is None
    assert (cache.num_free, cache.num_used, cache.num_cached) == (1, 2, 0)
    cache.check([blocks[:1], new])


def test_sec_19_equal_hashes_do_not_make_blocks_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found is compared by tokens, by all that came before, and by engine, adapter and salt."""
    monkeypatch.setattr(prefix_cache, "digest", lambda data: b"same")
    cache = KvCache(4, 2)
    (block,) = cache.allocate(1)
    stored = child(child(root("engine", "", "salt"), (1, 2)), (3, 4))
    assert cache.name(block, stored) is stored
    for scope, first, second in (
        (("engine", "", "salt"), (1, 2), (3, 5)),
        (("engine", "", "salt"), (1, 3), (3, 4)),
        (("engine", "", "pepper"), (1, 2), (3, 4)),
        (("engine", "lora", "salt"), (1, 2), (3, 4)),
        (("other", "", "salt"), (1, 2), (3, 4)),
    ):
        other = child(child(root(*scope), first), second)
        assert other.key == stored.key
        assert cache.find(other) is None
        assert cache.name(block, other) is other
    assert cache.find(child(root("engine", "", "salt"), (3, 4))) is None
    assert cache.find(child(child(root("engine", "", "salt"), (1, 2)), (3, 4))) == (block, stored)


def test_kv_20_a_hit_is_not_handed_out_again() -> None:
    cache = KvCache(2, 16)
    first = cache.allocate(2)
    cache.name(first[0], content(1))
    cache.release(first)
    found = cache.find(content(1))
    assert found is not None
    assert not cache.can_share([found[0]], 3)
    assert cache.can_share([found[0]], 2)
    cache.share([found[0]])
    table = [found[0], *cache.allocate(1)]
    cache.check([table])
    assert len(set(table)) == 2


def test_check_finds_mistakes() -> None:
    cache = KvCache(4, 16)
    blocks = cache.allocate(2)
    with pytest.raises(RuntimeError, match="users of blocks"):
        cache.check([])
    with pytest.raises(RuntimeError, match="has a block twice"):
        cache.check([[blocks[0], blocks[0]]])
    cache._free.pop()  # a block gets lost
    with pytest.raises(RuntimeError, match=r"1 free \+ 2 used \+ 0 cached blocks != 4"):
        cache.check([blocks])


def test_random_use_keeps_the_sum() -> None:
    random.seed(1)
    cache: KvCache = KvCache(32, 16)
    tables: list[list[int]] = []
    for _ in range(3000):
        action = random.random()
        if action < 0.4 and cache.num_available:
            tables.append(cache.allocate(random.randint(1, min(4, cache.num_available))))
        elif action < 0.6 and tables:
            source = random.choice(tables)
            shared = source[: random.randint(1, len(source))]
            cache.share(shared)
            tables.append(list(shared))
        elif action < 0.75 and tables:
            cache.name(random.choice(random.choice(tables)), content(random.randint(0, 40)))
        elif action < 0.8 and (found := cache.find(content(random.randint(0, 40)))) is not None:
            cache.share([found[0]])
            tables.append([found[0]])
        elif action < 0.82 and tables:
            cache.forget(random.choice(tables))
        elif tables:
            cache.release(tables.pop(random.randrange(len(tables))))
        cache.check(tables)


def test_block_table_rows() -> None:
    table = BlockTable()
    table.extend([5, 3])
    table.extend(range(100, 150))
    assert table.row.tolist() == table.blocks == [5, 3, *range(100, 150)]


def test_state_slots() -> None:
    pool = StatePool(2)
    a, b = pool.acquire(), pool.acquire()
    assert {a, b} == {0, 1}
    assert pool.num_free == 0
    with pytest.raises(AssertionError, match="no free state slot"):
        pool.acquire()
    pool.release(a)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(a)
    with pytest.raises(AssertionError, match="does not exist"):
        pool.release(2)
    assert pool.acquire() == a

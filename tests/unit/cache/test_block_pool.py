"""BlockPool against a plain model under random operations, and its named behaviours."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from forerun.cache import block_pool
from forerun.cache.block_pool import NULL_BLOCK, ROOT_KEY, BlockPool


class PoolMachine(RuleBasedStateMachine):
    """Random allocate / share / release / publish, mirrored by a list of tables."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.tables: list[list[int]] = []
        self.published: set[int] = set()
        self.drafter_valid: set[int] = set()

    @rule(count=st.integers(0, 10))
    def allocate(self, count: int) -> None:
        free = self.pool.num_free_blocks
        blocks = self.pool.allocate(count)
        assert (blocks is None) == (count > free)
        if blocks is not None:
            assert len(set(blocks)) == count
            self.published -= set(blocks)
            self.drafter_valid -= set(blocks)
            self.tables.append(blocks)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if self.tables:
            table = data.draw(st.sampled_from(self.tables))
            for block in table:
                self.pool.share(block)
            self.tables.append(list(table))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.tables:
            index = data.draw(st.integers(0, len(self.tables) - 1))
            self.pool.release(reversed(self.tables.pop(index)))

    @rule(data=st.data(), token=st.integers(0, 3))
    def publish_and_find(self, data: st.DataObject, token: int) -> None:
        fresh = sorted({b for table in self.tables for b in table} - self.published)
        if fresh:
            block = data.draw(st.sampled_from(fresh))
            self.pool.publish(block, ROOT_KEY, [token])
            self.published.add(block)
            assert self.pool.find(ROOT_KEY, [token]) is not None

    @rule(data=st.data())
    def fill_by_drafter(self, data: st.DataObject) -> None:
        held = sorted({block for table in self.tables for block in table})
        if held:
            block = data.draw(st.sampled_from(held))
            self.pool.mark_drafter_valid(block)
            self.drafter_valid.add(block)

    @invariant()
    def drafter_blocks_stay_valid_until_they_are_given_out(self) -> None:
        valid = {block for block in range(9) if self.pool.is_drafter_valid(block)}
        assert valid == self.drafter_valid

    @rule(token=st.integers(0, 3))
    def reuse_found(self, token: int) -> None:
        found = self.pool.find(ROOT_KEY, [token])
        if found is not None:
            self.pool.share(found[0])
            self.tables.append([found[0]])

    @invariant()
    def pool_is_whole(self) -> None:
        self.pool.check_integrity(self.tables)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def test_null_block_is_never_given_out() -> None:
    pool = BlockPool(4)
    assert NULL_BLOCK not in pool.allocate(3)
    assert pool.allocate(1) is None


def test_published_block_survives_release_until_evicted_longest_free_first() -> None:
    pool = BlockPool(4)
    first, second, third = pool.allocate(3)
    pool.publish(first, ROOT_KEY, [1])
    pool.publish(second, ROOT_KEY, [2])
    pool.release([first])
    pool.release([second])
    pool.release([third])  # worthless, so it goes first although it was freed last
    assert pool.allocate(1) == [third]
    assert pool.find(ROOT_KEY, [1]) is not None
    assert pool.allocate(1) == [first]
    assert pool.find(ROOT_KEY, [1]) is None
    assert pool.find(ROOT_KEY, [2])[0] == second


def test_hash_collision_is_a_miss_not_a_wrong_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_pool, "compute_block_key", lambda parent, tokens: 42)
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.publish(block, ROOT_KEY, [1, 2])
    assert pool.find(ROOT_KEY, [1, 2]) == (block, 42)
    assert pool.find(ROOT_KEY, [1, 3]) is None
    assert pool.find(7, [1, 2]) is None


def test_same_tokens_after_another_prefix_are_another_block() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    root = pool.publish(first, ROOT_KEY, [5])
    assert pool.find(root, [5]) is None
    pool.publish(second, root, [5])
    assert pool.find(root, [5])[0] == second
    assert pool.find(ROOT_KEY, [5])[0] == first


def test_integrity_check_sees_a_leak() -> None:
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check_integrity([])


def test_keys_do_not_collide_where_pythons_hash_does() -> None:
    """A hit compares its own block's tokens; the blocks before it are told apart by the parent key
    alone. Keys were Python's hash(), which is public and can be inverted, so that two prefixes
    could be made to share K/V. hash(2**61) == hash(1) is the cheapest such pair."""
    assert hash((ROOT_KEY, (1,))) == hash((ROOT_KEY, (2**61,)))
    keys = {block_pool.compute_block_key(ROOT_KEY, [token]) for token in (1, 2**61)}
    assert len(keys) == 2
    assert max(keys) > 2**64


def test_keys_tell_apart_where_a_block_ends() -> None:
    first = block_pool.compute_block_key(ROOT_KEY, [1])
    chained = block_pool.compute_block_key(first, [2])
    assert chained != block_pool.compute_block_key(ROOT_KEY, [1, 2])

"""KV blocks as numbers: who holds them, which can be evicted, which can be found by prefix.

A block is free (reference count 0, in the free queue) or held by one or more block tables. A full,
computed block may be *published* under a key chained over its whole prefix; a published block keeps
its content while free, until the queue hands it out again. A block is *drafter-valid* once a
drafter with layers of its own has K/V of all its tokens, until it is handed out anew. Block 0 is
the null block: never given out, only read as padding. No torch.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NULL_BLOCK = 0
ROOT_KEY = 0
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class PublishedBlock:
    """What a published block holds, kept to verify a hit against its own tokens."""

    key: int
    parent_key: int
    token_ids: tuple[int, ...]


def compute_block_key(parent_key: int, token_ids: Sequence[int]) -> int:
    """Return the key of a block: sha256 chained over every token from the start of the prefix.

    NOTE: a hit compares the tokens of its own block, not of the blocks before it: those are told
    apart by the parent key alone. Python's own hash() can be made to collide, and would then let
    one client choose the K/V that another one reads.
    """
    content = parent_key.to_bytes(_KEY_BYTES, "little") + array("q", token_ids).tobytes()
    return int.from_bytes(hashlib.sha256(content).digest(), "little")


class BlockPool:
    """All blocks of the KV store. Single-threaded; owned by the cache manager."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"the pool needs the null block and one more, got {num_blocks}.")
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        # NOTE: insertion order is eviction order: the front was freed longest ago.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._published: dict[int, PublishedBlock] = {}
        self._block_of_key: dict[int, int] = {}
        self._is_drafter_valid = bytearray(num_blocks)

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that can be given out, free or held."""
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be given out now."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks, evicting the longest-free; None (and no change) if too few."""
        if count > len(self._free):
            return None
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._unpublish(block)
            self._is_drafter_valid[block] = False
            self.ref_counts[block] = 1
        return taken

    def share(self, block: int) -> None:
        """Add a holder to a block that is held or still published."""
        if self.ref_counts[block] == 0:
            del self._free[block]
        self.ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one holder of each block, in the order they should be evicted."""
        for block in blocks:
            assert self.ref_counts[block] > 0, f"block {block} released but not held"
            self.ref_counts[block] -= 1
            if self.ref_counts[block] > 0:
                continue
            self._free[block] = None
            if block not in self._published:
                # An unpublished block is worth nothing: use it before evicting a prefix.
                self._free.move_to_end(block, last=False)

    def publish(self, block: int, parent_key: int, token_ids: Sequence[int]) -> int:
        """Make a full computed block findable and return its key; the first of equals wins."""
        assert self.ref_counts[block] > 0, f"block {block} published but not held"
        key = compute_block_key(parent_key, token_ids)
        if key not in self._block_of_key and block not in self._published:
            self._published[block] = PublishedBlock(key, parent_key, tuple(token_ids))
            self._block_of_key[key] = block
        return key

    def find(self, parent_key: int, token_ids: Sequence[int]) -> tuple[int, int] | None:
        """Return (block, key) of the published block with exactly this prefix, or None."""
        key = compute_block_key(parent_key, token_ids)
        block = self._block_of_key.get(key)
        if block is None:
            return None
        entry = self._published[block]
        if entry.parent_key != parent_key or entry.token_ids != tuple(token_ids):
            return None
        return block, key

    def mark_drafter_valid(self, block: int) -> None:
        """Record that the drafter has K/V of every token of a full computed block."""
        assert self.ref_counts[block] > 0, f"block {block} marked but not held"
        self._is_drafter_valid[block] = True

    def is_drafter_valid(self, block: int) -> bool:
        """Return whether the drafter has K/V of every token of the block."""
        return bool(self._is_drafter_valid[block])

    def forget_published(self) -> None:
        """Empty the prefix cache; held blocks stay held."""
        self._published.clear()
        self._block_of_key.clear()

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert that counts, queue and prefix index agree with these block tables."""
        held = [0] * self.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), f"a block appears twice in {table}"
            for block in table:
                held[block] += 1
        assert held[NULL_BLOCK] == 0, "the null block is in a block table"
        assert held == self.ref_counts, "reference counts differ from the block tables"
        free = {block for block in range(1, self.num_blocks) if held[block] == 0}
        assert free == set(self._free), f"free queue differs by {free ^ set(self._free)}"
        index = {entry.key: block for block, entry in self._published.items()}
        assert index == self._block_of_key, "prefix index and published blocks disagree"

    def _unpublish(self, block: int) -> None:
        entry = self._published.pop(block, None)
        if entry is not None:
            del self._block_of_key[entry.key]

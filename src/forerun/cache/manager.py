"""Block tables of requests: match a prefix, reserve, commit, truncate, free. No torch.

The manager is the only one that touches the pool. A table covers at least the computed tokens of
its request, plus what was reserved for this step; `commit` publishes the blocks that computed,
committed tokens have filled, so drafts that were rejected can never be found by anyone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.cache.block_pool import ROOT_KEY, BlockPool
from forerun.core import Request


@dataclass(slots=True)
class _Table:
    """One request's blocks and the key chain over those already published.

    `num_drafter_valid` counts leading blocks known to be drafter-valid.
    """

    blocks: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    num_drafter_valid: int = 0


class KVCacheManager:
    """Per-request block tables over one pool."""

    def __init__(
        self, *, num_blocks: int, kv_block_size: int, enable_prefix_caching: bool = True
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.kv_block_size = kv_block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._tables: dict[str, _Table] = {}

    @property
    def usage_frac(self) -> float:
        """Share of the usable blocks that are held."""
        usable = self.pool.num_usable_blocks
        return (usable - self.pool.num_free_blocks) / usable

    def block_table(self, request: Request) -> list[int]:
        """Return the request's live block table; read it, never write it."""
        return self._tables[request.request_id].blocks

    def count_blocks(self, num_tokens: int) -> int:
        """Return the blocks that hold this many tokens."""
        return -(-num_tokens // self.kv_block_size)

    def admit(self, request: Request, leader: Request | None = None) -> int:
        """Open a table and fill it with cached prefix blocks; return the tokens they cover.

        At least one token is always left to compute, so that the request gets logits. A `leader`
        is a sibling choice with the same prompt: its full prompt blocks are shared as they are,
        also when prefix caching is off.
        """
        assert request.request_id not in self._tables, f"{request.request_id} admitted twice"
        table = self._tables[request.request_id] = _Table()
        if request.bypasses_prefix_cache:
            return 0
        if leader is not None and leader.request_id in self._tables:
            self._share_with(table, request, self._tables[leader.request_id], leader)
        if self.enable_prefix_caching:
            self._match_prefix(table, request)
        table.num_drafter_valid = self._count_drafter_valid(table)
        return len(table.blocks) * self.kv_block_size

    def count_drafter_tokens(self, request: Request) -> int:
        """Return how many leading tokens the drafter has K/V of, in whole blocks."""
        return self._tables[request.request_id].num_drafter_valid * self.kv_block_size

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Grow the table to hold `num_tokens`; False (and no change) if the pool is too empty."""
        table = self._tables[request.request_id]
        missing = self.count_blocks(num_tokens) - len(table.blocks)
        if missing <= 0:
            return True
        blocks = self.pool.allocate(missing)
        if blocks is None:
            return False
        table.blocks.extend(blocks)
        return True

    def commit(self, request: Request) -> None:
        """Publish newly filled blocks of computed tokens and give back what is beyond them.

        Blocks the drafter has filled too become drafter-valid.
        """
        table = self._tables[request.request_id]
        if self.enable_prefix_caching:
            self._publish(table, request)
        self.mark_drafter_valid(request)
        self._truncate(table, request.num_computed_tokens)

    def mark_drafter_valid(self, request: Request) -> None:
        """Mark the full computed blocks that the drafter has filled, so that others need not."""
        table = self._tables[request.request_id]
        computed = min(request.num_drafter_computed_tokens, request.num_computed_tokens)
        filled = computed // self.kv_block_size
        for block in table.blocks[table.num_drafter_valid : filled]:
            self.pool.mark_drafter_valid(block)
        table.num_drafter_valid = max(table.num_drafter_valid, filled)

    def free(self, request: Request) -> None:
        """Give back all blocks; published ones stay findable until they are reused."""
        table = self._tables.pop(request.request_id, None)
        if table is not None:
            # Tail first: the end of a prefix is the least likely to be asked for again.
            self.pool.release(reversed(table.blocks))

    def reset_prefix_cache(self) -> None:
        """Forget all published blocks; running requests keep theirs."""
        self.pool.forget_published()

    def check_integrity(self) -> None:
        """Assert that pool and tables agree."""
        self.pool.check_integrity(table.blocks for table in self._tables.values())

    def _match_prefix(self, table: _Table, request: Request) -> None:
        size = self.kv_block_size
        usable = (len(request.token_ids) - 1) // size
        for index in range(len(table.blocks), usable):
            parent = table.keys[-1] if table.keys else ROOT_KEY
            found = self.pool.find(parent, request.token_ids[index * size : (index + 1) * size])
            if found is None:
                return
            block, key = found
            self.pool.share(block)
            table.blocks.append(block)
            table.keys.append(key)

    def _share_with(
        self, table: _Table, request: Request, leader_table: _Table, leader: Request
    ) -> None:
        computed = min(leader.num_computed_tokens, request.num_prompt_tokens - 1)
        for block in leader_table.blocks[: computed // self.kv_block_size]:
            self.pool.share(block)
            table.blocks.append(block)
        table.keys = leader_table.keys[: len(table.blocks)]
        if self.enable_prefix_caching:
            assert len(table.keys) == len(table.blocks), "computed blocks are always published"

    def _publish(self, table: _Table, request: Request) -> None:
        size = self.kv_block_size
        for index in range(len(table.keys), request.num_computed_tokens // size):
            parent = table.keys[-1] if table.keys else ROOT_KEY
            tokens = request.token_ids[index * size : (index + 1) * size]
            table.keys.append(self.pool.publish(table.blocks[index], parent, tokens))

    def _count_drafter_valid(self, table: _Table) -> int:
        for index, block in enumerate(table.blocks):
            if not self.pool.is_drafter_valid(block):
                return index
        return len(table.blocks)

    def _truncate(self, table: _Table, num_tokens: int) -> None:
        kept = self.count_blocks(num_tokens)
        if kept < len(table.blocks):
            self.pool.release(reversed(table.blocks[kept:]))
            del table.blocks[kept:]

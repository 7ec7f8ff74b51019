"""DSpark and DFlash: a block of drafts in one pass, fed by taps of the target's layers.

Methods "dspark" (arXiv 2607.05147) and "dflash" (arXiv 2602.06036, without sequential and
confidence head). Taps of every computed row become K/V in the drafter's layers of the pool
(context.py). For a block the anchor, the last committed token, and mask tokens go through the
backbone at the anchor's position and those after it; they see all positions before the anchor and
each other. Their own K/V lie in lookahead slots, which later rows overwrite before anybody reads
them. Fewer drafts than trained are a shorter block.
Shapes: T rows, N requests, R block rows, d hidden_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import numpy as np
import torch
from torch import Tensor

from forerun.attention.base import AttentionContext
from forerun.attention.layout import lay_out
from forerun.drafters.base import DrafterCache, DrafterCapabilities, DraftProposal
from forerun.drafters.draft_sampling import DraftRules
from forerun.drafters.dspark.backbone import Backbone
from forerun.drafters.dspark.checkpoint import check_target
from forerun.drafters.dspark.choosing import (
    BlockDraft,
    BlockHeads,
    BlockRows,
    choose_blocks,
    choose_in_turn,
)
from forerun.drafters.dspark.config import DSparkConfig
from forerun.drafters.dspark.context import ContextProjection
from forerun.layers.rotary import Rotary
from forerun.models.base import TargetModel
from forerun.models.decoder import DecoderModel
from forerun.plan import DraftRequest

MAX_LOGITS_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class DSparkParts:
    """The modules of one checkpoint, filled and packed; the backbone still lacks the target."""

    config: DSparkConfig
    backbone: Backbone
    context: ContextProjection
    heads: BlockHeads


@dataclass(slots=True)
class _Block:
    """The rows of one request's block."""

    num_computed_tokens: int
    num_rows: int
    block_table: Sequence[int]


class DSparkDrafter:
    """A block drafter. Keeps no state per request: what it has seen is in the pool."""

    def __init__(
        self, parts: DSparkParts, *, max_speculative_tokens: int, rules: DraftRules | None = None
    ) -> None:
        config = parts.config
        assert max_speculative_tokens <= config.block_size, (max_speculative_tokens, config)
        self._parts = parts
        self._config = config
        self._rules = rules or DraftRules()
        self.capabilities = DrafterCapabilities(
            max_speculative_tokens=max_speculative_tokens,
            target_layer_ids=config.target_layer_ids,
            kv_layers=parts.backbone.spec.build_kv_layers(),
            num_lookahead_slots=max_speculative_tokens,
            emits_confidence=config.has_confidence_head,
            emits_probs=not self._rules.is_greedy,
        )
        row_bytes = 4 * (config.vocab_size + max_speculative_tokens * config.draft_vocab_size)
        self._max_requests = max(1, MAX_LOGITS_BYTES // row_bytes)

    def bind(self, target: TargetModel, cache: DrafterCache) -> None:
        """Find the own layers in the pool, and take the target's embedding and head."""
        spec = target.spec
        check_target(
            self._config,
            hidden_size=spec.hidden_size,
            vocab_size=spec.vocab_size,
            num_layers=spec.num_layers,
        )
        assert isinstance(target, DecoderModel), "its tables are shared"
        self._parts.backbone.share_target(target, self._parts.heads.d2t)
        self._backend, self._device = cache.backend, cache.device
        self._kv_store = cache.kv_store.select(spec.num_layers, self._config.num_layers)
        self._parts.context.prepare_native(self._kv_store)

    def ingest(
        self,
        aux_hidden_states: Tensor,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionContext,
    ) -> None:
        """Write the K/V of every computed row, whoever's it is."""
        own = AttentionContext(
            backend=attention.backend, kv_store=self._kv_store, metadata=attention.metadata
        )
        rope = cast("Rotary", self._parts.backbone.ropes[0])
        self._parts.context.ingest(aux_hidden_states.flatten(1), positions, rope, own)

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        """Return `depth` tokens per request, at most a block; fewer where the context ends."""
        depths = np.array([self._clip_depth(request) for request in requests], dtype=np.int64)
        drafts = [BlockDraft([], []) for _ in requests]
        whole = [self._parts.heads.drafts_whole_blocks(self._rules, r) for r in requests]
        kinds = np.where(whole, depths, 0)
        # Blocks that are chosen together lie side by side.
        order = [i for i in np.argsort(kinds, kind="stable").tolist() if depths[i] > 0]
        for begin in range(0, len(order), self._max_requests):
            group = order[begin : begin + self._max_requests]
            drafted = self._draft_group([requests[i] for i in group], depths[group], kinds[group])
            for index, proposed in zip(group, drafted, strict=True):
                drafts[index] = proposed
        scores = [draft.scores for draft in drafts]
        has_head = self.capabilities.emits_confidence
        return DraftProposal(
            draft_token_ids=[draft.token_ids for draft in drafts],
            draft_probs=[draft.probs for draft in drafts],
            confidence=scores if has_head else None,
            evidence=None if has_head else scores,
        )

    def release(self, request_ids: Sequence[str]) -> None:
        """Nothing is kept: blocks are the scheduler's."""

    def _clip_depth(self, request: DraftRequest) -> int:
        """Return the depth at which the last row still lies within the drafter's context."""
        rows_of_one = self._config.count_slots(1)
        room = self._config.max_model_len - len(request.token_ids) + 2 - rows_of_one
        return max(0, min(request.depth, room, self.capabilities.max_speculative_tokens))

    def _draft_group(
        self, requests: Sequence[DraftRequest], depths: np.ndarray, kinds: np.ndarray
    ) -> list[BlockDraft]:
        """Draft for all; equal kinds, which are neighbours, are whole blocks of that depth or 0."""
        heads, drafts = self._parts.heads, []
        rows = self.compute_blocks(requests, depths)
        firsts = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(requests)]
        for first, stop in pairwise(firsts):
            own, part = requests[first:stop], rows.select(first, stop)
            if kinds[first]:
                drafts += choose_blocks(heads, own, part)
            else:
                drafts += choose_in_turn(heads, self._rules, own, depths[first:stop], part)
        return drafts

    def compute_blocks(self, requests: Sequence[DraftRequest], depths: np.ndarray) -> BlockRows:
        """Run the blocks of all requests through the backbone in one pass."""
        config = self._config
        num_skipped = config.count_slots(1) - 1  # slots of the anchor that predict nothing
        counts = depths + num_skipped
        ends = np.cumsum(counts)
        token_ids = np.full(ends[-1], config.mask_token_id, dtype=np.int64)
        token_ids[ends - counts] = [request.token_ids[-1] for request in requests]
        wanted = range(0) if num_skipped else range(len(token_ids))
        hidden, logits = self._forward(requests, counts.tolist(), token_ids, wanted)
        if num_skipped:
            keep = np.ones(len(token_ids), dtype=bool)
            keep[ends - counts] = False
            hidden = hidden[torch.from_numpy(keep).to(self._device)]
        if logits is None:
            logits = self._parts.backbone.compute_logits(hidden)
        return BlockRows(hidden, logits, np.cumsum(depths) - depths)

    def _forward(
        self,
        requests: Sequence[DraftRequest],
        counts: Sequence[int],
        token_ids: np.ndarray,
        logits_rows: range,
    ) -> tuple[Tensor, Tensor | None]:
        blocks = [
            _Block(len(request.token_ids) - 1, count, request.block_table)
            for request, count in zip(requests, counts, strict=True)
        ]
        layout = lay_out(blocks, self._kv_store.kv_block_size)
        attention = AttentionContext(
            backend=self._backend,
            kv_store=self._kv_store,
            metadata=self._backend.prepare(layout.attention, self._kv_store),
        )
        ids, positions = (
            torch.from_numpy(values).to(self._device) for values in (token_ids, layout.positions)
        )
        output = self._parts.backbone.forward(ids, positions, attention, (), logits_rows)
        return output.hidden_states, output.logits

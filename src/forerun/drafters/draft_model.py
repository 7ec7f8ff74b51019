"""Drafting with an independent small model of the target's vocabulary, token by token.

Method "draft_model" (Leviathan et al., Chen et al. 2023; vLLM's `draft_model`). Its K/V are more
layers of the target's pool under the same block tables. It has a gap of its own, because requests
that do not draft do not run it: `propose` first computes the committed tokens it lacks, in bounded
pieces, and the anchor; then one row per request and further draft. K/V of rejected drafts are
overwritten when their positions are computed again. Beyond its context it does not draft.
Shapes: T rows (num_tokens), N requests, n of them that still draft, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.attention.base import AttentionContext
from forerun.attention.layout import RowLayout, lay_out, lay_out_single_rows, pad_tables
from forerun.drafters.base import DrafterCache, DrafterCapabilities, DraftProposal
from forerun.drafters.draft_sampling import DraftRules, DraftSampler
from forerun.models.base import ModelOutput, TargetModel
from forerun.plan import DraftRequest

MAX_CATCH_UP_ROWS = 512
MAX_LOGITS_BYTES = 256 * 2**20


@dataclass(slots=True)
class _Span:
    """Rows of one request, from a position on."""

    num_computed_tokens: int
    num_rows: int
    block_table: Sequence[int]


@dataclass(slots=True)
class _Drafts:
    """What one request gets."""

    token_ids: list[int]
    evidence: list[float]
    probs: Tensor | None
    num_computed_tokens: int


class DraftModelDrafter:
    """A second model that drafts. Keeps no state per request: what it computed is in the pool."""

    def __init__(
        self, model: TargetModel, *, max_speculative_tokens: int, rules: DraftRules | None = None
    ) -> None:
        self._model = model
        self._rules = rules or DraftRules()
        self.capabilities = DrafterCapabilities(
            max_speculative_tokens=max_speculative_tokens,
            kv_layers=model.spec.build_kv_layers(),
            num_lookahead_slots=max_speculative_tokens,
            emits_probs=not self._rules.is_greedy,
        )
        self._max_requests = max(1, MAX_LOGITS_BYTES // (4 * model.spec.vocab_size))

    def bind(self, target: TargetModel, cache: DrafterCache) -> None:
        """Find the own layers in the pool; they follow the target's."""
        assert target.spec.vocab_size == self._model.spec.vocab_size, "logits must match"
        self._backend = cache.backend
        self._device = cache.device
        layers = self._model.spec.num_layers
        self._kv_store = cache.kv_store.select(target.spec.num_layers, layers)

    def ingest(
        self,
        aux_hidden_states: Tensor,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionContext,
    ) -> None:
        """Never happens: no layer of the target is tapped."""
        raise AssertionError("a draft model taps no layers")

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        """Return `depth` tokens per request; fewer where the model's context ends."""
        depths = np.array([self._clip_depth(request) for request in requests], dtype=np.int64)
        drafts = [_Drafts([], [], None, r.num_drafter_computed_tokens) for r in requests]
        active = np.flatnonzero(depths > 0).tolist()
        for begin in range(0, len(active), self._max_requests):
            group = active[begin : begin + self._max_requests]
            drafted = self._draft_group([requests[i] for i in group], depths[group])
            for index, proposed in zip(group, drafted, strict=True):
                drafts[index] = proposed
        return DraftProposal(
            draft_token_ids=[draft.token_ids for draft in drafts],
            draft_probs=[draft.probs for draft in drafts],
            evidence=[draft.evidence for draft in drafts],
            num_computed_tokens=[draft.num_computed_tokens for draft in drafts],
        )

    def release(self, request_ids: Sequence[str]) -> None:
        """Nothing is kept: blocks are the scheduler's."""

    def _clip_depth(self, request: DraftRequest) -> int:
        """Return the depth at which the last row still lies within the model's context."""
        room = self._model.spec.max_model_len - len(request.token_ids) + 1
        return max(0, min(request.depth, room, self.capabilities.max_speculative_tokens))

    def _draft_group(self, requests: Sequence[DraftRequest], depths: np.ndarray) -> list[_Drafts]:
        """Draft depths[i] > 0 tokens for every request, all together."""
        sampler = DraftSampler(requests, self._rules, self._model.spec.vocab_size)
        active = np.arange(len(requests))
        lengths = np.array([len(request.token_ids) for request in requests], dtype=np.int64)
        tables = pad_tables([request.block_table for request in requests])
        logits = self._catch_up(requests)
        owners, chosen = [], []
        for place in range(int(depths.max())):
            token_ids, evidence = sampler.choose(logits, active, place)
            owners.append(active)
            chosen.append(torch.stack([token_ids.double(), evidence.double()], dim=1))
            goes_on = depths[active] > place + 1
            if not goes_on.any():
                break
            if not goes_on.all():
                token_ids = token_ids[torch.from_numpy(goes_on).to(self._device)]
                active, lengths, tables = active[goes_on], lengths[goes_on], tables[goes_on]
            logits = self._step(token_ids, lengths + place, tables)
        drafts = [
            _Drafts([], [], probs, len(request.token_ids) + int(depth) - 1)
            for request, probs, depth in zip(requests, sampler.probs, depths, strict=True)
        ]
        # One transfer for all tokens: until here the host knows none of them.
        pairs = torch.cat(chosen).tolist()
        for owner, (token_id, evidence) in zip(np.concatenate(owners), pairs, strict=True):
            drafts[owner].token_ids.append(int(token_id))
            drafts[owner].evidence.append(evidence)
        return drafts

    def _catch_up(self, requests: Sequence[DraftRequest]) -> Tensor:
        """Compute committed tokens without K/V, the anchors last; return their logits [N, V]."""
        starts = [request.num_drafter_computed_tokens for request in requests]
        num_rows = sum(len(r.token_ids) for r in requests) - sum(starts)
        if num_rows > max(MAX_CATCH_UP_ROWS, len(requests)):
            for piece in _cut(requests, MAX_CATCH_UP_ROWS):
                self._compute(requests, piece)
            starts = [len(request.token_ids) - 1 for request in requests]
        spans = [(i, start, len(requests[i].token_ids)) for i, start in enumerate(starts)]
        return self._compute_logits(requests, spans)

    def _compute_logits(
        self, requests: Sequence[DraftRequest], spans: Sequence[tuple[int, int, int]]
    ) -> Tensor:
        """Compute spans of committed tokens and return the logits after each span."""
        ends = np.cumsum([stop - start for _, start, stop in spans])
        is_dense = ends[-1] == len(spans)
        rows = range(len(spans)) if is_dense else range(0)
        output = self._compute(requests, spans, rows)
        if output.logits is not None:
            return output.logits
        last = torch.from_numpy(ends - 1).to(self._device)
        return self._model.compute_logits(output.hidden_states[last])

    def _compute(
        self,
        requests: Sequence[DraftRequest],
        spans: Sequence[tuple[int, int, int]],
        logits_rows: range = range(0),
    ) -> ModelOutput:
        """Run (request, first position, end) spans of committed tokens."""
        token_ids = [t for i, start, stop in spans for t in requests[i].token_ids[start:stop]]
        rows = [_Span(start, stop - start, requests[i].block_table) for i, start, stop in spans]
        layout = lay_out(rows, self._kv_store.kv_block_size)
        return self._forward(layout, torch.tensor(token_ids, device=self._device), logits_rows)

    def _step(self, token_ids: Tensor, positions: np.ndarray, tables: np.ndarray) -> Tensor:
        """Compute one drafted token per request; return the logits after it, [n, V]."""
        layout = lay_out_single_rows(tables, positions, self._kv_store.kv_block_size)
        output = self._forward(layout, token_ids, range(len(positions)))
        if output.logits is not None:
            return output.logits
        return self._model.compute_logits(output.hidden_states)

    def _forward(self, layout: RowLayout, token_ids: Tensor, logits_rows: range) -> ModelOutput:
        attention = AttentionContext(
            backend=self._backend,
            kv_store=self._kv_store,
            metadata=self._backend.prepare(layout.attention, self._kv_store),
        )
        positions = torch.from_numpy(layout.positions).to(self._device)
        return self._model.forward(token_ids, positions, attention, (), logits_rows)


def _cut(requests: Sequence[DraftRequest], limit: int) -> Iterator[list[tuple[int, int, int]]]:
    """Yield (request, start, stop) spans of what lacks K/V before the anchors, `limit` rows each.

    A request is in a piece once at most, so its rows follow one another from piece to piece.
    """
    piece: list[tuple[int, int, int]] = []
    room = limit
    for index, request in enumerate(requests):
        start, end = request.num_drafter_computed_tokens, len(request.token_ids) - 1
        while start < end:
            stop = min(end, start + room)
            piece.append((index, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield piece
                piece, room = [], limit
    if piece:
        yield piece

"""Host side of the PyTorch attention: which requests are computed together, and the index tensors.

Requests with few rows (decode, verify) are put into buckets of similar size and computed as one
batched product, padded to the bucket's most rows and longest context. Requests with many rows
(prefill chunks) are cut into pieces computed one by one. A plan depends on head counts and window,
not on the layer, so it is built once per step and kind of layer.
Shapes: T rows, N requests of a bucket, R its most rows, B its most blocks, bs kv_block_size,
S = B * bs positions, Hq / Hkv query / KV heads, G = Hq / Hkv.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.attention.base import AttentionBatch, AttentionLayer

FEW_ROWS = 16
PIECE_ROWS = 256
# What one more bucket costs, in units of one position gathered and multiplied with one row.
_BUCKET_COST = 1600.0
# A padded row costs this much of a gathered position.
_ROW_COST = 0.08


@dataclass(frozen=True, slots=True)
class Bucket:
    """Requests computed by one batched product. Padded rows repeat a request's last row."""

    num_reqs: int
    num_rows: int
    gather_index: Tensor  # [N * Hkv * B], rows of the pool seen as [blocks * Hkv, bs * D]
    query_index: Tensor | None  # [N * R] rows of the step; None: all rows in order
    mask: Tensor  # [N, 1, R, 1, S], 0 or -inf


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of one request. Without `gather_index` they see the step's own K/V only."""

    start: int
    stop: int
    key_start: int  # first row seen, where the context is empty
    gather_index: Tensor | None  # [Hkv * B]
    mask: Tensor | None  # [rows, keys] bool; None: plain causal


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """How one kind of layer is computed this step."""

    buckets: list[Bucket]
    pieces: list[Piece]
    # Rows of the buckets' results, seen as [.., D], for each (row, head) of the step. None: the
    # only bucket's result is the answer as it stands.
    result_index: Tensor | None  # [T * Hq]


class PlanBuilder:
    """Builds the plans of one step."""

    def __init__(self, batch: AttentionBatch, kv_block_size: int, device: torch.device) -> None:
        self.batch = batch
        self.kv_block_size = kv_block_size
        self.device = device
        self.num_rows = np.diff(batch.query_start_loc)

    def build(self, layer: AttentionLayer, dtype: torch.dtype) -> LayerPlan:
        """Return the plan for layers with these head counts and this window."""
        few = np.flatnonzero((self.num_rows > 0) & (self.num_rows <= FEW_ROWS))
        groups = list(self._group(few, layer.window))
        pieces = [
            piece
            for req in np.flatnonzero(self.num_rows > FEW_ROWS)
            for piece in self._cut(int(req), layer)
        ]
        buckets = [self._build_bucket(group, layer, dtype) for group in groups]
        if len(buckets) == 1 and buckets[0].query_index is None:
            return LayerPlan(buckets, pieces, None)
        return LayerPlan(buckets, pieces, self._build_result_index(groups, layer))

    def build_slot_index(self, num_kv_heads: int) -> Tensor:
        """Return where each (row, KV head) goes in the pool seen as [blocks * Hkv * bs, D]."""
        block, offset = np.divmod(self.batch.slot_mapping, self.kv_block_size)
        heads = block[:, None] * num_kv_heads + np.arange(num_kv_heads)
        return self._tensor((heads * self.kv_block_size + offset[:, None]).ravel())

    def build_fresh_blocks(self) -> Tensor | None:
        """Return blocks that get their first position, but not their last, in this step."""
        block, offset = np.divmod(self.batch.slot_mapping, self.kv_block_size)
        fresh = np.setdiff1d(block[offset == 0], block[offset == self.kv_block_size - 1])
        return self._tensor(fresh) if len(fresh) else None

    def _visible_blocks(
        self, reqs: np.ndarray, window: int | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return each request's first and one-past-last block that any of its rows sees."""
        context = self.batch.context_lens[reqs]
        stop = -(-(context + self.num_rows[reqs]) // self.kv_block_size)
        if window is None:
            return np.zeros_like(stop), stop
        return np.maximum(context - window + 1, 0) // self.kv_block_size, stop

    def _group(self, reqs: np.ndarray, window: int | None) -> Iterator[np.ndarray]:
        """Split requests into buckets: close one when its padding costs more than another bucket.

        Sorted by class of row count, then length, neighbours are alike and padding grows slowly.
        """
        first, stop = self._visible_blocks(reqs, window)
        lengths = (stop - first) * self.kv_block_size
        rows = self.num_rows[reqs]
        order = np.lexsort((-lengths, np.searchsorted([1, 8], rows)))
        weights = lengths * (1.0 + _ROW_COST * rows)
        begin, used, longest, most = 0, 0.0, 0, 0
        for place, index in enumerate(order.tolist()):
            used += weights[index]
            longest, most = max(longest, int(lengths[index])), max(most, int(rows[index]))
            padded = (place - begin + 1) * longest * (1.0 + _ROW_COST * most)
            if padded - used > _BUCKET_COST and place > begin:
                yield np.sort(reqs[order[begin:place]])
                begin, used = place, float(weights[index])
                longest, most = int(lengths[index]), int(rows[index])
        if begin < len(order):
            yield np.sort(reqs[order[begin:]])

    def _build_bucket(self, reqs: np.ndarray, layer: AttentionLayer, dtype: torch.dtype) -> Bucket:
        first, stop = self._visible_blocks(reqs, layer.window)
        places = first[:, None] + np.arange((stop - first).max())  # [N, B]
        rows = self._padded_rows(reqs)
        positions = self.batch.context_lens[reqs, None] + rows  # [N, R]
        query_rows = (self.batch.query_start_loc[reqs, None] + rows).ravel()
        in_order = len(query_rows) == len(self.batch.slot_mapping) and rows.shape[1] == 1
        ends = self.batch.context_lens[reqs] + self.num_rows[reqs]
        visible = self._see(positions, places, layer, ends[:, None])
        mask = torch.zeros(visible.shape, dtype=dtype, device=self.device)
        mask.masked_fill_(~visible, float("-inf"))
        return Bucket(
            num_reqs=len(reqs),
            num_rows=rows.shape[1],
            gather_index=self._gather_index(reqs, places, stop, layer.num_kv_heads),
            query_index=None if in_order else self._tensor(query_rows),
            mask=mask[:, None, :, None],
        )

    def _padded_rows(self, reqs: np.ndarray) -> np.ndarray:
        """Return row numbers [N, R]; past a request's end its last row again."""
        rows = self.num_rows[reqs]
        return np.minimum(np.arange(rows.max()), rows[:, None] - 1)

    def _see(
        self, positions: np.ndarray, places: np.ndarray, layer: AttentionLayer, ends: np.ndarray
    ) -> Tensor:
        """Return which positions [.., R] see which keys of blocks [.., B]; bool [.., R, S].

        `ends` [.., 1] counts the positions of each request, this step's included.
        """
        offsets = np.arange(self.kv_block_size)
        keys = (places[..., None] * self.kv_block_size + offsets).reshape(*places.shape[:-1], -1)
        last = positions if layer.causal else np.zeros_like(positions) + ends - 1
        query, key = self._tensor(positions)[..., None], self._tensor(keys)[..., None, :]
        visible = key <= self._tensor(last)[..., None]
        if layer.window is not None:
            visible &= key > query - layer.window
        return visible

    def _gather_index(
        self, reqs: np.ndarray, places: np.ndarray, stop: np.ndarray, num_kv_heads: int
    ) -> Tensor:
        """Return pool rows in the order [N, Hkv, B]; blocks not seen become the null block."""
        inside = places < stop[:, None]
        blocks = self.batch.block_tables[reqs[:, None], np.where(inside, places, 0)] * inside
        heads = np.arange(num_kv_heads)[:, None]
        return self._tensor((blocks[:, None] * num_kv_heads + heads).ravel())

    def _build_result_index(self, groups: list[np.ndarray], layer: AttentionLayer) -> Tensor:
        """Map each (row, query head) of the step to its row in the buckets' joined results."""
        hkv, group_size = layer.num_kv_heads, layer.num_heads // layer.num_kv_heads
        index = np.zeros((len(self.batch.slot_mapping), hkv, group_size), dtype=np.int64)
        start = 0
        for reqs in groups:
            rows = self._padded_rows(reqs)
            shape = (len(reqs), hkv, rows.shape[1], group_size)
            places = start + np.arange(np.prod(shape)).reshape(shape)
            start += places.size
            # Padding is written first-come: a row's last copy wins, and all copies are equal.
            flat = (self.batch.query_start_loc[reqs, None] + rows).ravel()
            index[flat] = places.swapaxes(1, 2).reshape(-1, hkv, group_size)
        return self._tensor(index.ravel())

    def _cut(self, req: int, layer: AttentionLayer) -> Iterator[Piece]:
        """Cut a prefill chunk into pieces; without context and window one causal piece is best."""
        start, stop = (int(x) for x in self.batch.query_start_loc[req : req + 2])
        context = int(self.batch.context_lens[req])
        if layer.causal and context == 0 and (layer.window is None or stop - start <= layer.window):
            yield Piece(start, stop, start, None, None)
            return
        for low in range(start, stop, PIECE_ROWS):
            high = min(low + PIECE_ROWS, stop)
            positions = context + np.arange(low - start, high - start)
            yield self._build_piece(req, (low, high), positions, layer)

    def _build_piece(
        self, req: int, rows: tuple[int, int], positions: np.ndarray, layer: AttentionLayer
    ) -> Piece:
        window = layer.window
        seen = 0 if window is None else max(int(positions[0]) - window + 1, 0)
        end = self.batch.context_lens[req] + self.num_rows[req]
        last = int(positions[-1]) if layer.causal else int(end) - 1
        first, stop = seen // self.kv_block_size, last // self.kv_block_size + 1
        places = np.arange(first, stop)
        blocks = self.batch.block_tables[req, places]
        heads = np.arange(layer.num_kv_heads)[:, None]
        index = self._tensor((blocks * layer.num_kv_heads + heads).ravel())
        visible = self._see(positions, places, layer, np.array([end]))
        return Piece(rows[0], rows[1], 0, index, visible)

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)

"""The AttentionBackend contract: ragged queries over a paged KV pool.

Shapes: T rows of the step (num_tokens), N requests (num_reqs), Hq query heads, Hkv KV heads,
D head_dim. Request i owns rows query_start_loc[i] .. query_start_loc[i + 1]; its row r sits at
position context_lens[i] + r and sees every position of its request up to its own (all of them if
the layer is not causal), within the layer's sliding window. There is no special case for prefill,
decode or verification.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from forerun.cache.kv_store import KVStore


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionLayer:
    """What one attention layer needs beyond its inputs.

    `window` w means a row at position p sees none before p - w + 1; None means all. A layer that is
    not `causal` sees the rows after its own too: the mask block of a parallel drafter. `index` is
    the layer's place in the KV store (drafter layers come after the target's).
    """

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    causal: bool = True
    # What a plan of a step depends on: equal for layers that differ in their index only.
    kind: tuple[object, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Derive the kind once: backends look it up for every layer of every step."""
        heads = (self.num_heads, self.num_kv_heads, self.head_dim, self.scale)
        object.__setattr__(self, "kind", (*heads, self.window, self.causal))


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionBatch:
    """Host description of one step's rows, independent of layers.

    `context_lens` counts positions cached before this step. `slot_mapping` gives, per row, the
    physical slot (block id x kv_block_size + offset) its K/V go to. `block_tables` is padded with
    the null block 0 on the right; entry [i, j] holds positions j*bs .. (j+1)*bs - 1.
    """

    query_start_loc: np.ndarray  # [num_reqs + 1] int64
    context_lens: np.ndarray  # [num_reqs] int64
    block_tables: np.ndarray  # [num_reqs, max_blocks] int64
    slot_mapping: np.ndarray  # [num_tokens] int64


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCapabilities:
    """What a backend can do, as data."""

    supports_sliding_window: bool
    supports_varlen_graph: bool


class AttentionBackend(Protocol):
    """Writes this step's K/V into the pool and attends. May mutate the KV store only.

    `prepare` runs once per step; what it returns is opaque to everyone else and is passed to every
    `attend` of that step. `attend` writes `key` and `value` to the rows' slots of `layer` first, so
    rows of one request see each other; rows of different requests never do.
    """

    capabilities: AttentionCapabilities

    def prepare(self, batch: AttentionBatch, kv_store: KVStore) -> Any:
        """Build the per-step metadata shared by all layers."""
        ...

    def attend(
        self,
        query: Tensor,  # [num_tokens, num_heads, head_dim]
        key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: Tensor,  # [num_tokens, num_kv_heads, head_dim]
        *,
        layer: AttentionLayer,
        kv_store: KVStore,
        metadata: Any,
    ) -> Tensor:  # [num_tokens, num_heads * head_dim]
        """Write K/V, attend, and return the heads' outputs side by side."""
        ...

    def write(
        self,
        key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: Tensor,  # [num_tokens, num_kv_heads, head_dim]
        *,
        index: int,
        kv_store: KVStore,
        metadata: Any,
    ) -> None:
        """Write K/V of the step's rows to layer `index` of the store, for later steps to read."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionContext:
    """The backend bound to one step; what models receive."""

    backend: AttentionBackend
    kv_store: KVStore
    metadata: Any

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: AttentionLayer) -> Tensor:
        """Attend with this step's metadata; shapes as in AttentionBackend.attend."""
        return self.backend.attend(
            query, key, value, layer=layer, kv_store=self.kv_store, metadata=self.metadata
        )

    def write(self, key: Tensor, value: Tensor, index: int) -> None:
        """Write K/V of this step's rows to a layer; shapes as in AttentionBackend.write."""
        self.backend.write(key, value, index=index, kv_store=self.kv_store, metadata=self.metadata)

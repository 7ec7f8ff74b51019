"""The Drafter contract.

A drafter proposes the next tokens of a request from its committed tokens and, if it says so, from
the target's hidden states of computed rows. It may not read or change scheduler state, and keeps
K/V only as extra layers of the shared pool, so prefix hits and preemption restore it for free. Such
layers follow the target's in the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from forerun.plan import DraftRequest

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from forerun.attention.base import AttentionBackend, AttentionContext
    from forerun.cache.kv_store import KVLayerShape, KVStore
    from forerun.models.base import TargetModel
    from forerun.tokenization import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterCapabilities:
    """What a drafter needs and gives, as data.

    `target_layer_ids` are the target layers it taps. `kv_layers` are its layers in the shared pool.
    `num_lookahead_slots` counts pool slots past the committed tokens that `propose` writes: as many
    as it drafts, or 0 if drafted tokens leave no K/V. The scheduler reserves them beforehand.
    """

    max_speculative_tokens: int
    target_layer_ids: tuple[int, ...] = ()
    kv_layers: tuple[KVLayerShape, ...] = ()
    num_lookahead_slots: int = 0
    emits_confidence: bool = False
    emits_probs: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterCache:
    """Where a drafter with layers in the pool computes: the whole pool, target layers first."""

    kv_store: KVStore
    backend: AttentionBackend
    device: torch.device


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterLoading:
    """What a drafter with weights must match: the target's vocabulary, and how it is held.

    `quantization` is as load_model takes it.
    """

    tokenizer: Tokenizer
    vocab_size: int
    device: torch.device
    dtype: torch.dtype
    quantization: str
    max_model_len: int


@dataclass(slots=True, kw_only=True)
class DraftProposal:
    """Proposed tokens for several requests, in the order asked.

    `draft_probs` None means the proposal is deterministic (one-hot q). Otherwise row [i, j] is the
    float32 distribution over the target vocabulary that token j of request i was drawn from: the
    very tensor, not a recomputation; an entry None is deterministic. `confidence` entry [i][j] is
    the predicted chance that token j is accepted given that those before it were; `evidence` is
    what stands in for it, in log-odds, for an estimator to calibrate. Both are functions of the
    prefix, never of the drawn token. `num_computed_tokens` as in RequestDraft.
    """

    draft_token_ids: list[list[int]]
    draft_probs: Sequence[Tensor | None] | Tensor | None = None  # [num_reqs][k, vocab_size]
    confidence: list[list[float]] | None = None
    evidence: list[list[float]] | None = None
    num_computed_tokens: list[int] | None = None


class Drafter(Protocol):
    """One drafting method. One instance per runner, single-threaded."""

    capabilities: DrafterCapabilities

    def bind(self, target: TargetModel, cache: DrafterCache) -> None:
        """Meet target and pool once, before the first step (to share embeddings and head)."""
        ...

    def ingest(
        self,
        aux_hidden_states: Tensor,  # [num_tokens, num_taps, hidden_size]
        token_ids: Tensor,  # [num_tokens]
        positions: Tensor,  # [num_tokens]
        attention: AttentionContext,
    ) -> None:
        """Take in the taps of every computed row. Called only when layers are tapped."""
        ...

    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        """Propose up to `depth` tokens for each request; fewer, or none, is fine."""
        ...

    def release(self, request_ids: Sequence[str]) -> None:
        """Forget these requests. Unknown ids are ignored."""
        ...

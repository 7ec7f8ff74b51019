"""Random block drafters for tiny targets, and a pool to run them on without an engine.

`Bench` owns a pool with the target's layers and the drafter's. It computes rows of the target, so
that the drafter ingests their taps, and keeps the taps for the reference network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tiny_models
from forerun.attention import build_attention_backend
from forerun.attention.base import AttentionContext
from forerun.attention.layout import lay_out
from forerun.cache.kv_store import KVStore
from forerun.core import SamplingParams
from forerun.drafters.base import DrafterCache
from forerun.drafters.draft_sampling import DraftRules
from forerun.drafters.dspark.config import DSparkConfig
from forerun.drafters.dspark.drafter import DSparkDrafter
from forerun.drafters.dspark.load import build_parts
from forerun.drafters.dspark.network import BlockBatch, DSparkNetwork
from forerun.layers.linear import WeightOptions
from forerun.models.decoder import DecoderModel
from forerun.plan import DraftRequest

KV_BLOCK_SIZE = 4
BLOCK_SIZE = 5
GREEDY = SamplingParams(temperature=0.0)
_BLOCKS_EACH = 60


def make_target(*, vocab_size: int = 257, seed: int = 1, **overrides: Any) -> DecoderModel:
    """Return a random Llama of four layers without EOS."""
    sizes = {"num_hidden_layers": 4, "eos_token_id": None, **overrides}
    return tiny_models.make_model(vocab_size=vocab_size, seed=seed, **sizes)


def make_config(method: str = "dspark", **overrides: Any) -> DSparkConfig:
    """Return a drafter for `make_target`, with a reduced vocabulary unless told otherwise."""
    heads = {"markov_rank": 16, "has_confidence_head": True} if method == "dspark" else {}
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_model_len": 512,
        "vocab_size": 257,
        "draft_vocab_size": 96,
        "block_size": BLOCK_SIZE,
        "target_layer_ids": (-1, 0, 2),
        "mask_token_id": 3,
    }
    return DSparkConfig(**{**sizes, **heads, **overrides})


def make_network(config: DSparkConfig, target: DecoderModel, *, seed: int = 0) -> DSparkNetwork:
    """Return a random drafter with the target's tables and weights large enough to matter."""
    torch.manual_seed(seed)
    network = DSparkNetwork(config)
    for name, weight in network.named_parameters():
        if name.endswith("norm.weight"):
            weight.data.uniform_(0.5, 1.5)
        else:
            weight.data.normal_(0.0, weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.3)
    if config.has_reduced_vocab:
        chosen = torch.randperm(config.vocab_size)[: config.draft_vocab_size]
        network.set_draft_vocabulary(chosen.sort().values)
    every_id = torch.arange(config.vocab_size)
    network.share_target(
        target.embed.table.read_rows(every_id).float(),
        target.head.table.read_rows(every_id).float(),
    )
    return network.eval()


def list_tensors(network: DSparkNetwork) -> dict[str, Tensor]:
    """Return what a checkpoint that leaves the target's tables out would hold."""
    tensors = dict(network.state_dict())
    del tensors["embed_tokens.weight"], tensors["lm_head.weight"]
    return tensors


def make_drafter(
    network: DSparkNetwork,
    *,
    depth: int | None = None,
    dtype: torch.dtype = torch.float32,
    is_quantised: bool = False,
    **rules: Any,
) -> DSparkDrafter:
    """Return the drafter over the pool with a network's weights."""
    options = WeightOptions(dtype, torch.device("cpu"))
    parts = build_parts(network.config, list_tensors(network), options, is_quantised=is_quantised)
    return DSparkDrafter(
        parts,
        max_speculative_tokens=depth or network.config.block_size,
        rules=DraftRules(**rules),
    )


@dataclass
class Rows:
    """Consecutive rows of one request."""

    num_computed_tokens: int
    num_rows: int
    block_table: list[int]


class Bench:
    """A target and a drafter over one pool; requests are told apart by their place."""

    def __init__(
        self,
        target: DecoderModel,
        drafter: DSparkDrafter,
        *,
        backend: str = "torch_ref",
        kv_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.target, self.drafter = target, drafter
        self.backend = build_attention_backend(backend)
        self.store = KVStore(
            [*target.spec.build_kv_layers(), *drafter.capabilities.kv_layers],
            num_blocks=1 + 8 * _BLOCKS_EACH,
            kv_block_size=KV_BLOCK_SIZE,
            dtype=kv_dtype,
            device="cpu",
        )
        cpu = torch.device("cpu")
        drafter.bind(target, DrafterCache(kv_store=self.store, backend=self.backend, device=cpu))
        self.features: dict[int, Tensor] = {}  # by place, [rows, n * d], the latest of each row

    @torch.inference_mode()
    def compute(self, *spans: tuple[int, Sequence[int], int]) -> None:
        """Compute (place, tokens, first position) spans to the end of their tokens, in one step."""
        rows = [
            Rows(start, len(tokens) - start, self.find_table(place, len(tokens)))
            for place, tokens, start in spans
        ]
        layout = lay_out(rows, KV_BLOCK_SIZE)
        metadata = self.backend.prepare(layout.attention, self.store)
        attention = AttentionContext(backend=self.backend, kv_store=self.store, metadata=metadata)
        ids = torch.tensor([token for _, tokens, start in spans for token in tokens[start:]])
        positions = torch.from_numpy(layout.positions)
        layers = self.drafter.capabilities.target_layer_ids
        output = self.target.forward(ids, positions, attention, layers)
        assert output.aux_hidden_states is not None
        self.drafter.ingest(output.aux_hidden_states, ids, positions, attention)
        taps = output.aux_hidden_states.flatten(1).split([row.num_rows for row in rows])
        for (place, _, start), tap in zip(spans, taps, strict=True):
            known = self.features.get(place, tap[:0])[:start]
            self.features[place] = torch.cat([known, tap])

    def find_table(self, place: int, num_tokens: int) -> list[int]:
        """Return the blocks of a request as far as its tokens reach."""
        first = 1 + _BLOCKS_EACH * place
        return list(range(first, first - (-num_tokens // KV_BLOCK_SIZE)))

    def ask(
        self,
        tokens: Sequence[int],
        *,
        place: int = 0,
        depth: int | None = None,
        params: SamplingParams = GREEDY,
        seed: int = 5,
        num_draws: int = 0,
    ) -> DraftRequest:
        """Return a request whose tokens but the last are computed."""
        most = self.drafter.capabilities.max_speculative_tokens
        return DraftRequest(
            request_id=f"r{place}",
            generation=0,
            token_ids=list(tokens),
            depth=depth or most,
            block_table=self.find_table(place, len(tokens) + most),
            params=params,
            seed=seed,
            choice_index=0,
            num_draws=num_draws,
        )

    @torch.inference_mode()
    def run_reference(self, network: DSparkNetwork, requests: Sequence[DraftRequest]) -> Tensor:
        """Return the network's hidden states of the requests' blocks, one after the other."""
        hidden = []
        for request in requests:
            place = int(request.request_id[1:])
            context = len(request.token_ids) - 1
            features = self.features[place][:context].float()
            batch = BlockBatch(
                features=features,
                sequence_starts=[0, context],
                anchor_ids=torch.tensor([request.token_ids[-1]]),
                anchor_positions=torch.tensor([context]),
                anchor_counts=[1],
                block_size=request.depth,
            )
            hidden.append(network(batch)[0])
        return torch.cat(hidden)

    @torch.inference_mode()
    def run_drafter(self, requests: Sequence[DraftRequest]) -> tuple[Tensor, Tensor]:
        """Return the drafter's hidden states and base logits of the same rows."""
        depths = np.array([request.depth for request in requests], dtype=np.int64)
        rows = self.drafter.compute_blocks(requests, depths)
        return rows.hidden, rows.logits

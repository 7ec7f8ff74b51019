"""Tiny random models of the four families, and a runner that feeds them ragged steps.

`make_spec` and `make_model` need no files. `save_hf_model` writes a random transformers model to a
folder, for parity tests. `PagedRunner` owns a KV store and block tables and runs one step at a time
over several sequences, with block ids handed out in shuffled order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forerun.attention import build_attention_backend
from forerun.attention.base import AttentionBatch, AttentionContext
from forerun.cache.kv_store import KVStore
from forerun.models import find_model_class
from forerun.models.base import ModelOutput
from forerun.models.decoder import DecoderModel
from forerun.models.loader import random_model
from forerun.models.spec import Fields, ModelSpec

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")
WINDOW = 7

_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {}),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 9,
        },
    ),
}


def make_config(family: str = "llama", **overrides: Any) -> dict[str, Any]:
    """Return the config.json of a tiny model."""
    architecture, _, special = _FAMILIES[family]
    return {"architectures": [architecture], **_SIZES, **special, **overrides}


def make_spec(family: str = "llama", **overrides: Any) -> ModelSpec:
    """Return the spec of a tiny model; `overrides` are config.json keys."""
    config = make_config(family, **overrides)
    return find_model_class(config["architectures"][0]).spec_from_hf(Fields(config, "config.json"))


def make_model(
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    pack: bool = True,
    **overrides: Any,
) -> DecoderModel:
    """Return a tiny random model."""
    return random_model(make_spec(family, **overrides), seed=seed, dtype=dtype, pack=pack)


def save_hf_model(folder: Path, family: str, *, shard_bytes: int = 2**30, **overrides: Any) -> Any:
    """Write a random transformers model to a folder and return it, in float32 and eval mode."""
    import transformers

    _, config_class, _ = _FAMILIES[family]
    config = getattr(transformers, config_class)(**make_config(family, **overrides))
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for name, weight in model.named_parameters():
        # Norms away from their initial constant, and weights large enough to matter.
        scale = 0.3 if name.endswith("norm.weight") else 0.15
        weight.data.add_(torch.randn_like(weight), alpha=scale)
    model.save_pretrained(folder, max_shard_size=shard_bytes)
    return model


@dataclass(eq=False)
class PagedSequence:
    """Tokens, how many of them are in the cache, and where."""

    token_ids: list[int]
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)


class PagedRunner:
    """Runs ragged steps of one model and returns logits of every row."""

    def __init__(
        self,
        model: DecoderModel,
        *,
        num_blocks: int = 200,
        kv_block_size: int = 4,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.kv_block_size = kv_block_size
        self.kv_store = KVStore(
            model.spec.build_kv_layers(),
            num_blocks=num_blocks,
            kv_block_size=kv_block_size,
            dtype=kv_dtype or model.embed.table.dtype,
            device="cpu",
        )
        self.backend = build_attention_backend("torch_ref")
        self._free = random.Random(0).sample(range(1, num_blocks), num_blocks - 1)

    def add(self, token_ids: Sequence[int]) -> PagedSequence:
        """Return a new sequence with nothing computed."""
        return PagedSequence(list(token_ids))

    def fork(self, sequence: PagedSequence, num_tokens: int, rest: Sequence[int]) -> PagedSequence:
        """Return a sequence that shares the full blocks of the first `num_tokens` tokens."""
        num_shared = num_tokens // self.kv_block_size
        computed = num_shared * self.kv_block_size
        assert computed <= sequence.num_computed
        tokens = sequence.token_ids[:num_tokens] + list(rest)
        return PagedSequence(tokens, computed, sequence.block_table[:num_shared])

    @torch.inference_mode()
    def step(
        self, work: Sequence[tuple[PagedSequence, int]], target_layer_ids: Sequence[int] = ()
    ) -> tuple[list[torch.Tensor], ModelOutput]:
        """Compute the next rows of each sequence; returns logits per sequence and the output."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        context_lens = [sequence.num_computed for sequence, _ in work]
        for sequence, num_rows in work:
            own = range(sequence.num_computed, sequence.num_computed + num_rows)
            while len(sequence.block_table) * self.kv_block_size < own.stop:
                sequence.block_table.append(self._free.pop())
            token_ids += sequence.token_ids[own.start : own.stop]
            positions += own
            slots += [self._slot(sequence, position) for position in own]
            sequence.num_computed = own.stop
        counts = [num_rows for _, num_rows in work]
        batch = AttentionBatch(
            query_start_loc=np.cumsum([0, *counts]),
            context_lens=np.array(context_lens),
            block_tables=_pad([sequence.block_table for sequence, _ in work]),
            slot_mapping=np.array(slots),
        )
        output = self._forward(token_ids, positions, batch, target_layer_ids)
        return list(self.model.compute_logits(output.hidden_states).split(counts)), output

    def _forward(
        self,
        token_ids: list[int],
        positions: list[int],
        batch: AttentionBatch,
        target_layer_ids: Sequence[int],
    ) -> ModelOutput:
        metadata = self.backend.prepare(batch, self.kv_store)
        attention = AttentionContext(
            backend=self.backend, kv_store=self.kv_store, metadata=metadata
        )
        ids, places = torch.tensor(token_ids), torch.tensor(positions)
        return self.model.forward(ids, places, attention, target_layer_ids)

    def _slot(self, sequence: PagedSequence, position: int) -> int:
        block, offset = divmod(position, self.kv_block_size)
        return sequence.block_table[block] * self.kv_block_size + offset


def generate_greedy(
    runner: PagedRunner, prompt_ids: Sequence[int], num_tokens: int
) -> tuple[list[int], list[float]]:
    """Return the greedy continuation and the top-1/top-2 logit margin of each step."""
    sequence = runner.add(prompt_ids)
    new_ids, margins = [], []
    while len(new_ids) < num_tokens:
        gap = len(sequence.token_ids) - sequence.num_computed
        (logits,), _ = runner.step([(sequence, gap)])
        top = logits[-1].topk(2)
        new_ids.append(int(top.indices[0]))
        margins.append(float(top.values[0] - top.values[1]))
        sequence.token_ids.append(new_ids[-1])
    return new_ids, margins


def _pad(tables: list[list[int]]) -> np.ndarray:
    width = max(len(table) for table in tables)
    return np.array([table + [0] * (width - len(table)) for table in tables])

"""Engines over small random models: the real runner, verifier, cache and scheduler.

`vocab_size` can be as small as 5, so that output laws can be enumerated exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fakes import ByteTokenizer
from forerun.attention import build_attention_backend
from forerun.attention.base import AttentionBatch, AttentionContext
from forerun.cache.kv_store import KVStore
from forerun.config import EngineConfig
from forerun.drafters import build_drafter
from forerun.drafters.base import Drafter
from forerun.engine.build import assemble_engine
from forerun.engine.engine import Engine
from forerun.engine.resolve import Resolved
from forerun.engine.runner import ModelRunner
from forerun.models.decoder import DecoderModel
from forerun.models.loader import random_model
from forerun.models.spec import LayerSpec, ModelSpec, RopeSpec
from forerun.verification.verify import Verifier

KV_BLOCK_SIZE = 4


def make_spec(*, vocab_size: int = 257, num_layers: int = 2) -> ModelSpec:
    """Return a Llama of a few thousand parameters."""
    layer = LayerSpec(window=None, rope=RopeSpec(theta=10_000.0))
    return ModelSpec(
        architecture="LlamaForCausalLM",
        hidden_size=32,
        intermediate_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=vocab_size,
        max_model_len=512,
        rms_norm_eps=1e-5,
        attention_scale=8**-0.5,
        layers=(layer,) * num_layers,
        tie_word_embeddings=False,
    )


def make_model(*, vocab_size: int = 257, seed: int = 0) -> DecoderModel:
    """Return a random model in float32."""
    return random_model(make_spec(vocab_size=vocab_size), seed=seed, dtype=torch.float32)


class NoEosTokenizer(ByteTokenizer):
    """Byte tokenizer whose sequences only end by max_tokens or explicit stops."""

    eos_token_ids = frozenset()


def make_model_engine(
    model: DecoderModel,
    *,
    drafter: Drafter | None = None,
    num_blocks: int = 2049,
    **options: object,
) -> Engine:
    """Build an engine around a model; `options` are those of EngineConfig.from_options."""
    config = EngineConfig.from_options(kv_block_size=KV_BLOCK_SIZE, **options)
    kv_store = KVStore(
        model.spec.build_kv_layers(),
        num_blocks=num_blocks,
        kv_block_size=KV_BLOCK_SIZE,
        dtype=torch.float32,
        device="cpu",
    )
    runner = ModelRunner(
        model=model,
        drafter=drafter or build_drafter(config.speculative),
        verifier=Verifier(config.speculative.rejection_sample_method),
        kv_store=kv_store,
        backend=build_attention_backend("torch_ref"),
        device=torch.device("cpu"),
    )
    resolved = Resolved(
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_model_len=model.spec.max_model_len,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens or 256,
        num_threads=1,
        kv_cache_bytes=0,
        num_blocks=num_blocks,
    )
    return assemble_engine(
        config, resolved, runner=runner, tokenizer=NoEosTokenizer(), spec=model.spec
    )


@torch.inference_mode()
def compute_last_logits(model: DecoderModel, token_ids: Sequence[int]) -> torch.Tensor:
    """Return the float32 logits [vocab_size] after a whole sequence, from an empty cache."""
    length = len(token_ids)
    num_blocks = -(-length // KV_BLOCK_SIZE)
    kv_store = KVStore(
        model.spec.build_kv_layers(),
        num_blocks=num_blocks + 1,
        kv_block_size=KV_BLOCK_SIZE,
        dtype=next(iter(model.parameters())).dtype,
        device="cpu",
    )
    backend = build_attention_backend("torch_ref")
    batch = AttentionBatch(
        query_start_loc=np.array([0, length]),
        context_lens=np.array([0]),
        block_tables=np.arange(1, num_blocks + 1)[None],
        slot_mapping=np.arange(KV_BLOCK_SIZE, KV_BLOCK_SIZE + length),
    )
    attention = AttentionContext(
        backend=backend, kv_store=kv_store, metadata=backend.prepare(batch, kv_store)
    )
    output = model.forward(torch.tensor(token_ids), torch.arange(length), attention)
    return model.compute_logits(output.hidden_states[-1:])[0]

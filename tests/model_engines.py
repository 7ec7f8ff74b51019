"""Engines over small random models: the real runner, verifier, cache and scheduler.

`vocab_size` can be as small as 5, so that output laws can be enumerated exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

import tiny_models
from fakes import ByteTokenizer
from forerun.attention import build_attention_backend
from forerun.budget.costs.profile import CostProfile
from forerun.cache.kv_store import KVStore
from forerun.config import EngineConfig
from forerun.drafters import build_drafter
from forerun.drafters.base import Drafter
from forerun.engine.build import assemble_engine
from forerun.engine.engine import Engine
from forerun.engine.resolve import Resolved
from forerun.engine.runner import ModelRunner
from forerun.models.decoder import DecoderModel
from forerun.verification.verify import Verifier

KV_BLOCK_SIZE = 4


def make_model(*, vocab_size: int = 257, seed: int = 0) -> DecoderModel:
    """Return a random Llama in float32 that has no EOS."""
    return tiny_models.make_model(vocab_size=vocab_size, seed=seed, eos_token_id=None)


class NoEosTokenizer(ByteTokenizer):
    """Byte tokenizer whose sequences only end by max_tokens or explicit stops."""

    eos_token_ids = frozenset()


def make_model_engine(
    model: DecoderModel,
    *,
    drafter: Drafter | None = None,
    num_blocks: int = 2049,
    kv_dtype: torch.dtype = torch.float32,
    backend: str = "torch_ref",
    profile: CostProfile | None = None,
    **options: object,
) -> Engine:
    """Build an engine around a model; `options` are those of EngineConfig.from_options.

    Speculation is plain n-gram unless something is said about it. With a `profile` steps take no
    time, so that it stays as it is.
    """
    options.setdefault("speculative_config", {"method": "ngram"})
    config = EngineConfig.from_options(kv_block_size=KV_BLOCK_SIZE, **options)
    drafter = drafter or build_drafter(config.speculative)
    kv_store = KVStore(
        [*model.spec.build_kv_layers(), *drafter.capabilities.kv_layers],
        num_blocks=num_blocks,
        kv_block_size=KV_BLOCK_SIZE,
        dtype=kv_dtype,
        device="cpu",
    )
    runner = ModelRunner(
        model=model,
        drafter=drafter,
        verifier=Verifier(
            config.speculative.rejection_sample_method, config.speculative.survival_rates
        ),
        kv_store=kv_store,
        backend=build_attention_backend(backend),
        device=torch.device("cpu"),
    )
    resolved = Resolved(
        device=torch.device("cpu"),
        dtype=torch.float32,
        kv_dtype=kv_dtype,
        max_model_len=model.spec.max_model_len,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens or 256,
        max_prefill_while_decoding=config.scheduler.max_num_batched_tokens or 256,
        num_threads=1,
        kv_cache_bytes=0,
        num_blocks=num_blocks,
    )
    engine = assemble_engine(
        config,
        resolved,
        runner=runner,
        tokenizer=NoEosTokenizer(),
        spec=model.spec,
        drafter=drafter.capabilities,
        profile=profile,
    )
    if profile is not None:
        engine._now_s = lambda: 0.0
    return engine


def compute_last_logits(model: DecoderModel, token_ids: Sequence[int]) -> torch.Tensor:
    """Return the float32 logits [vocab_size] after a whole sequence, from an empty cache."""
    runner = tiny_models.PagedRunner(model)
    (logits,), _ = runner.step([(runner.add(token_ids), len(token_ids))])
    return logits[-1]

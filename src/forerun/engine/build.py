"""From a configuration to a running engine: load, resolve, wire the seams together."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import forerun
from forerun.attention import build_attention_backend
from forerun.budget import build_policy
from forerun.cache.kv_store import KVStore
from forerun.cache.manager import KVCacheManager
from forerun.config import EngineConfig
from forerun.data.bundled import resolve_model_path
from forerun.drafters import build_drafter, read_kv_layers
from forerun.drafters.base import DrafterLoading
from forerun.engine.allocator import keep_freed_memory
from forerun.engine.engine import Engine
from forerun.engine.messages import EngineLimits
from forerun.engine.resolve import Resolved, resolve
from forerun.engine.runner import ModelRunner
from forerun.engine.scheduler import Scheduler, SchedulerLimits
from forerun.errors import ConfigError
from forerun.logs import get_logger
from forerun.models.base import TargetModel
from forerun.models.decoder import DecoderModel
from forerun.models.loader import load_model, read_model_spec
from forerun.models.spec import ModelSpec
from forerun.plan import Runner
from forerun.tokenization import Tokenizer, load_tokenizer
from forerun.verification.verify import Verifier

logger = get_logger(__name__)

# New objects between two runs of the cycle collector; Python's 700 are less than one large step.
_COLLECT_AFTER = 20_000

Progress = Callable[[int, int], None]


def build_engine(
    config: EngineConfig, *, progress: Progress | None = None
) -> tuple[Engine, Tokenizer, dict[str, Any]]:
    """Load the model and return (engine, tokenizer, info); raises ConfigError.

    `progress(done, total)` is called while weights load.
    """
    path = resolve_model_path(config.model.model)
    spec = read_model_spec(path)
    layers = [*spec.build_kv_layers(), *read_kv_layers(config.speculative)]
    resolved = resolve(config, spec, layers)
    backend = build_attention_backend(resolved.attention_backend)
    keep_freed_memory()
    tokenizer = load_tokenizer(path)
    is_q8_0 = config.model.quantization == "q8_0"
    quantization = "q8_0" if is_q8_0 else resolved.quantization
    loading = DrafterLoading(
        tokenizer=tokenizer,
        vocab_size=spec.vocab_size,
        device=resolved.device,
        dtype=resolved.dtype,
        quantization=quantization,
        max_model_len=resolved.max_model_len,
    )
    drafter = build_drafter(config.speculative, loading)
    model = load_model(
        path,
        dtype=resolved.dtype,
        device=resolved.device,
        progress=progress,
        quantization=quantization,
    )
    is_invariant = _settle_crossover(config, resolved, model)
    kv_store = KVStore(
        layers,
        num_blocks=resolved.num_blocks,
        kv_block_size=config.cache.kv_block_size,
        dtype=resolved.kv_dtype,
        device=resolved.device,
    )
    runner = ModelRunner(
        model=model,
        drafter=drafter,
        verifier=Verifier(
            config.speculative.rejection_sample_method, config.speculative.survival_rates
        ),
        kv_store=kv_store,
        backend=backend,
        device=resolved.device,
    )
    engine = assemble_engine(
        config,
        resolved,
        runner=runner,
        tokenizer=tokenizer,
        spec=spec,
        num_lookahead_slots=drafter.capabilities.num_lookahead_slots,
    )
    _calm_collector()
    info = describe_engine(config, resolved, model, engine)
    weight_types = model.count_weight_types()
    info |= {"batch_invariant": is_invariant, "weight_types": weight_types}
    return engine, tokenizer, info


def _calm_collector() -> None:
    """Keep Python's cycle collector from taking part in every few steps.

    What was loaded lives as long as the engine; what steps allocate hardly ever forms cycles.
    """
    gc.collect()
    gc.freeze()
    youngest, *older = gc.get_threshold()
    gc.set_threshold(max(youngest, _COLLECT_AFTER), *older)


def _settle_crossover(config: EngineConfig, resolved: Resolved, model: DecoderModel) -> bool:
    """Let large steps use oneDNN where it is faster; return whether bits depend on no other row."""
    is_native = model.segments is not None and resolved.attention_backend == "native"
    if config.model.batch_invariant:
        if not is_native:
            raise ConfigError(
                "--batch-invariant needs the native kernels for attention and linear layers, which "
                "this device or model does not use; leave it out, or see `forerun doctor`."
            )
        return True
    num_rows = model.measure_crossover()
    model.switch_from(num_rows)
    logger.info("linear layers switch to oneDNN: %s", f"from {num_rows} rows" if num_rows else "no")
    return is_native and num_rows is None


def assemble_engine(
    config: EngineConfig,
    resolved: Resolved,
    *,
    runner: Runner,
    tokenizer: Tokenizer,
    spec: ModelSpec,
    num_lookahead_slots: int = 0,
) -> Engine:
    """Wire cache, policy, scheduler and runner into an engine."""
    cache = KVCacheManager(
        num_blocks=resolved.num_blocks,
        kv_block_size=config.cache.kv_block_size,
        enable_prefix_caching=config.cache.enable_prefix_caching,
    )
    limits = SchedulerLimits(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        max_prefill_while_decoding=resolved.max_prefill_while_decoding,
        max_waiting_requests=config.scheduler.max_waiting_requests,
        num_lookahead_slots=num_lookahead_slots,
    )
    scheduler = Scheduler(limits, cache, build_policy(config.speculative))
    engine_limits = EngineLimits(
        max_model_len=resolved.max_model_len,
        vocab_size=spec.vocab_size,
        num_kv_blocks=cache.pool.num_usable_blocks,
        kv_block_size=config.cache.kv_block_size,
        max_waiting_requests=config.scheduler.max_waiting_requests,
    )
    return Engine(
        scheduler=scheduler,
        runner=runner,
        tokenizer=tokenizer,
        limits=engine_limits,
        eos_token_ids=tokenizer.eos_token_ids.union(spec.eos_token_ids),
    )


def describe_engine(
    config: EngineConfig, resolved: Resolved, model: TargetModel, engine: Engine
) -> dict[str, Any]:
    """Return the JSON-ready facts of /server_info, and log the choice of drafter and policy."""
    speculative = config.speculative
    policy = engine.scheduler.policy.name
    reason = f"policy {policy!r} verifies a constant number of drafts"
    logger.info(
        "drafter %s, k = %d, policy %s, verifier %s; adaptive off: %s",
        speculative.method,
        speculative.max_draft_tokens,
        policy,
        speculative.rejection_sample_method,
        reason,
    )
    return {
        "version": forerun.__version__,
        "model": config.model.model,
        "architecture": model.spec.architecture,
        "device": str(resolved.device),
        "dtype": str(resolved.dtype).removeprefix("torch."),
        "quantization": resolved.quantization,
        "num_threads": resolved.num_threads,
        "attention_backend": resolved.attention_backend,
        "max_model_len": resolved.max_model_len,
        "max_num_seqs": config.scheduler.max_num_seqs,
        "max_num_batched_tokens": resolved.max_num_batched_tokens,
        "max_prefill_while_decoding": resolved.max_prefill_while_decoding,
        "kv_cache": {
            "dtype": str(resolved.kv_dtype).removeprefix("torch."),
            "bytes": resolved.kv_cache_bytes,
            "num_blocks": engine.limits.num_kv_blocks,
            "kv_block_size": engine.limits.kv_block_size,
            "prefix_caching": config.cache.enable_prefix_caching,
        },
        "speculative": {
            "method": speculative.method,
            "num_speculative_tokens": speculative.max_draft_tokens,
            "policy": policy,
            "rejection_sample_method": speculative.rejection_sample_method,
            "adaptive_active": False,
            "adaptive_reason": reason,
        },
    }

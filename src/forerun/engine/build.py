"""From a configuration to a running engine: load, resolve, wire the seams together."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import forerun
from forerun.attention import build_attention_backend
from forerun.budget import build_controller
from forerun.budget.confidence.calibration import ConfidenceTemperatures
from forerun.budget.costs.profile import CostProfile
from forerun.cache.kv_store import KVStore
from forerun.cache.manager import KVCacheManager
from forerun.config import EngineConfig
from forerun.data.bundled import resolve_model_path
from forerun.drafters import build_drafter, build_lookup, read_kv_layers
from forerun.drafters.base import Drafter, DrafterCapabilities, DrafterLoading
from forerun.drafters.locate import find_drafter_path
from forerun.engine.allocator import give_back_freed_memory, keep_freed_memory
from forerun.engine.engine import Engine
from forerun.engine.messages import EngineLimits
from forerun.engine.resolve import Resolved, resolve
from forerun.engine.runner import ModelRunner, count_logits_rows
from forerun.engine.scheduler import Scheduler, SchedulerLimits
from forerun.errors import ConfigError
from forerun.hidden_states import HiddenStateSink
from forerun.logs import get_logger
from forerun.models.base import TargetModel
from forerun.models.decoder import DecoderModel
from forerun.models.loader import load_model, read_model_spec
from forerun.models.spec import ModelSpec
from forerun.plan import Runner
from forerun.profiling.key import build_profile_key, build_profile_limits
from forerun.profiling.source import obtain_profile
from forerun.speculative_config import SpeculativeConfig
from forerun.tokenization import Tokenizer, load_tokenizer
from forerun.verification.verify import Verifier

logger = get_logger(__name__)

# New objects between two runs of the cycle collector; Python's 700 are less than one large step.
_COLLECT_AFTER = 20_000

_EXPLAINED_POLICIES = {
    "adaptive": "adaptive verification is on",
    "fixed": 'adaptive off: every draft is verified; "enable_adaptive_verification" is not given',
    "schedule": "adaptive off: the number of drafts follows a given schedule",
    "threshold": "adaptive off: drafts are cut at a given confidence",
    "none": "adaptive off: there is no drafter",
}

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """What a configuration loads: everything below the scheduler."""

    path: Path
    resolved: Resolved
    tokenizer: Tokenizer
    drafter: Drafter
    model: DecoderModel
    runner: ModelRunner
    is_invariant: bool


def load_parts(
    config: EngineConfig,
    *,
    progress: Progress | None = None,
    sink: HiddenStateSink | None = None,
) -> EngineParts:
    """Load the model and build its runner; raises ConfigError."""
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
        progress=_name_stage(progress, "loading weights"),
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
        sink=sink,
    )
    return EngineParts(
        path=path,
        resolved=resolved,
        tokenizer=tokenizer,
        drafter=drafter,
        model=model,
        runner=runner,
        is_invariant=is_invariant,
    )


def build_engine(
    config: EngineConfig,
    *,
    progress: Progress | None = None,
    sink: HiddenStateSink | None = None,
) -> tuple[Engine, Tokenizer, dict[str, Any]]:
    """Load the model and return (engine, tokenizer, info); raises ConfigError.

    `progress(stage, done, total)` is called while it starts; `sink` gets all hidden states.
    """
    parts = load_parts(config, progress=progress, sink=sink)
    profile = None
    if config.speculative.enable_adaptive_verification:
        profile = find_costs(config, parts, progress=progress)
    engine = assemble_engine(
        config,
        parts.resolved,
        runner=parts.runner,
        tokenizer=parts.tokenizer,
        spec=parts.model.spec,
        drafter=parts.drafter.capabilities,
        profile=profile,
        temperatures=load_temperatures(config.speculative),
    )
    _calm_collector()
    info = describe_engine(config, parts.resolved, parts.model, engine)
    weight_types = parts.model.count_weight_types()
    info |= {"batch_invariant": parts.is_invariant, "weight_types": weight_types}
    return engine, parts.tokenizer, info


def find_costs(
    config: EngineConfig,
    parts: EngineParts,
    *,
    progress: Progress | None = None,
    is_fresh: bool = False,
) -> CostProfile:
    """Return the cost profile of these parts: given, stored, or measured now."""
    profile = obtain_profile(
        parts.runner,
        build_profile_key(
            config, parts.resolved, parts.path, find_drafter_path(config.speculative)
        ),
        given_path=config.speculative.cost_profile,
        limits=build_profile_limits(config, parts.resolved, parts.model.spec.vocab_size),
        progress=_name_stage(progress, "measuring step costs"),
        is_fresh=is_fresh,
    )
    # The largest step measured is larger than nearly all to come, and freed memory is kept.
    give_back_freed_memory()
    return profile


def _name_stage(progress: Progress | None, stage: str) -> Callable[[int, int], None] | None:
    return None if progress is None else partial(progress, stage)


def load_temperatures(config: SpeculativeConfig) -> ConfidenceTemperatures | None:
    """Return the temperatures that lie beside a draft model, if any; raises ConfigError."""
    path = find_drafter_path(config)
    if path is None or not path.is_dir():
        return None
    return ConfidenceTemperatures.load(path, config.num_speculative_tokens)


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
    drafter: DrafterCapabilities | None = None,
    profile: CostProfile | None = None,
    temperatures: ConfidenceTemperatures | None = None,
) -> Engine:
    """Wire cache, budget, scheduler and runner into an engine.

    `drafter` defaults to one that needs and gives nothing; adaptive verification needs a `profile`.
    """
    drafter = drafter or DrafterCapabilities(max_speculative_tokens=0)
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
        num_lookahead_slots=drafter.num_lookahead_slots,
        max_logits_rows=count_logits_rows(spec.vocab_size),
    )
    speculative = config.speculative
    budget = build_controller(
        speculative,
        num_slots=config.scheduler.max_num_seqs,
        profile=profile,
        has_head=drafter.emits_confidence,
        temperatures=temperatures,
    )
    scheduler = Scheduler(
        limits,
        cache,
        budget,
        default_method=speculative.rejection_sample_method,
        lookup=build_lookup(speculative),
    )
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
    speculative = _describe_speculation(config.speculative, engine)
    logger.info(
        "drafter %(method)s, k = %(num_speculative_tokens)d, policy %(policy)s, verifier "
        "%(rejection_sample_method)s; %(adaptive_reason)s",
        speculative,
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
        "speculative": speculative,
    }


def _describe_speculation(config: SpeculativeConfig, engine: Engine) -> dict[str, Any]:
    budget = engine.scheduler.budget
    policy = budget.policy.name
    described: dict[str, Any] = {
        "method": config.method,
        "model": config.model or None,
        "prompt_lookup": config.prompt_lookup,
        "num_speculative_tokens": config.max_draft_tokens,
        "policy": policy,
        "rejection_sample_method": config.rejection_sample_method,
        "adaptive_active": policy == "adaptive",
        "adaptive_reason": _EXPLAINED_POLICIES[policy],
    }
    if budget.costs is not None:
        profile = budget.costs.profile
        described["cost_profile"] = {"source": profile.source, **profile.to_dict()}
    return described

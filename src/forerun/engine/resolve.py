"""Fill in every "auto" of the configuration, and log each choice with its reason."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from forerun.cache.kv_store import KVLayerShape, compute_block_bytes
from forerun.config import EngineConfig, parse_bytes
from forerun.errors import ConfigError
from forerun.kernels import explain_kernels, find_kernels
from forerun.logs import get_logger
from forerun.models.spec import FLOAT_TYPES, ModelSpec
from forerun.quantisation.rows import dequantise_rows, quantise_rows

logger = get_logger(__name__)

DEFAULT_KV_CACHE_BYTES = 2**30
DEFAULT_CPU_ROWS = 512
DEFAULT_ACCELERATOR_ROWS = 8192
# With 32 decoding rows: a step of about three and a half times the one without (docs/log.md).
DEFAULT_CPU_PREFILL_ROWS = 112


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """Every choice made, none left open."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    max_model_len: int
    max_num_batched_tokens: int
    max_prefill_while_decoding: int
    num_threads: int
    kv_cache_bytes: int
    num_blocks: int
    attention_backend: str = "torch_ref"
    quantization: str = "exact"


def resolve(config: EngineConfig, spec: ModelSpec, layers: Sequence[KVLayerShape]) -> Resolved:
    """Return the resolved choices; raises ConfigError for what cannot be had."""
    device = _resolve_device(config.model.device)
    dtype = _resolve_dtype(config.model.dtype, device)
    kv_dtype = _resolve_kv_dtype(config.cache.kv_cache_dtype, dtype, device)
    threads = _resolve_threads(config.model.num_threads)
    rows = _resolve_rows(config, device)
    kv_bytes, num_blocks = _resolve_blocks(config, layers, kv_dtype)
    return Resolved(
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        max_model_len=_resolve_length(config.model.max_model_len, spec),
        max_num_batched_tokens=rows,
        max_prefill_while_decoding=_resolve_prefill_rows(config, device, rows),
        num_threads=threads,
        kv_cache_bytes=kv_bytes,
        num_blocks=num_blocks,
        attention_backend=_resolve_attention(config.model.attention_backend, device),
        quantization=_resolve_quantization(config.model.quantization, device, spec.quantization),
    )


def _resolve_device(name: str) -> torch.device:
    if name == "auto":
        chosen = "cuda" if torch.cuda.is_available() else "cpu"
        logger.info("device %s: %s", chosen, "a GPU is visible" if chosen != "cpu" else "no GPU")
        return torch.device(chosen)
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # a device without storage, such as meta, fails here
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--device {name!r} cannot be used: {reason}") from error
    return device


def _resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        logger.info("dtype %s: given", name)
        return dtype
    if device.type != "cpu" or _cpu_has_bfloat16():
        logger.info("dtype bfloat16: the device computes it natively")
        return torch.bfloat16
    logger.info("dtype float32: this CPU has no native bfloat16")
    return torch.float32


def _resolve_kv_dtype(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    if name == "auto":
        logger.info("KV pool in %s: the model's type", str(dtype).removeprefix("torch."))
        return dtype
    try:
        numbers, scales = quantise_rows(torch.tensor([0.0, 1.0, -254.0], device=device))
        # A pool is zeroed, written and gathered; a device that lacks one of these for int8 fails.
        pool = torch.ones(2, 3, dtype=torch.int8, device=device).zero_()
        place = torch.ones(1, dtype=torch.int64, device=device)
        pool.index_copy_(0, place, numbers[None])
        dequantise_rows(pool.index_select(0, place), scales[None], dtype).tolist()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"--kv-cache-dtype int8 cannot be had on {device}: {reason} Give auto."
        ) from error
    logger.info("KV pool in int8: given; a scale per token and KV head")
    return torch.int8


def _cpu_has_bfloat16() -> bool:
    flags = torch.backends.cpu.get_cpu_capability()
    probe = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(flags != "DEFAULT" and probe is not None and probe())


def _resolve_threads(given: int | None) -> int:
    if given is not None:
        torch.set_num_threads(given)
        logger.info("threads %d: given", given)
        return given
    threads = torch.get_num_threads()
    logger.info("threads %d: torch's default on %d CPUs", threads, os.cpu_count() or 1)
    return threads


def _resolve_attention(given: str, device: torch.device) -> str:
    if given != "auto":
        logger.info("attention %s: given", given)
        if given == "native" and device.type != "cpu":
            raise ConfigError(
                f"--attention-backend native runs on the CPU, the device is {device}; give auto "
                "or torch_ref."
            )
        return given
    if device.type != "cpu":
        logger.info("attention torch_ref: the native kernels run on the CPU only")
        return "torch_ref"
    chosen = "torch_ref" if find_kernels() is None else "native"
    logger.info("attention %s: %s", chosen, explain_kernels())
    return chosen


def _resolve_quantization(given: str, device: torch.device, stored: str | None) -> str:
    """Return int8 or exact; `stored` is the type of most weights in a GGUF file, if it is one."""
    is_quantised = stored is not None and stored not in FLOAT_TYPES
    if given == "auto":
        reason = _find_int8_obstacle(device, is_quantised)
        mode = "int8" if reason is None else "exact"
        logger.info("quantization %s: %s", mode, reason or f"weights are stored as {stored}")
        return mode
    logger.info("quantization %s: given", given)
    if given == "exact":
        return given
    if device.type != "cpu":
        raise ConfigError(
            f"--quantization {given} computes on the CPU, the device is {device}; give auto or "
            "exact."
        )
    if given == "int8" and not is_quantised:
        raise ConfigError(
            f"--quantization int8 needs quantised weights; most of this model's are stored as "
            f"{stored or 'floats'}. Give q8_0 to quantise them at start, or auto."
        )
    if find_kernels() is None:
        logger.warning("quantised layers are computed in PyTorch, slowly: %s", explain_kernels())
    return "int8"


def _find_int8_obstacle(device: torch.device, is_quantised: bool) -> str | None:
    """Return why quantised weights are not multiplied as they are stored; None: they are."""
    if device.type != "cpu":
        return f"int8 computes on the CPU, the device is {device}"
    if not is_quantised:
        return "weights are stored as floats"
    return explain_kernels() if find_kernels() is None else None


def _resolve_length(given: int | None, spec: ModelSpec) -> int:
    longest = spec.max_model_len
    if given is None:
        logger.info("max_model_len %d: the model's context", longest)
        return longest
    if given > longest:
        raise ConfigError(
            f"--max-model-len {given} is longer than the model's context of {longest} tokens; "
            f"give at most {longest}."
        )
    if given < 2:
        raise ConfigError("--max-model-len must be at least 2: one prompt and one output token.")
    logger.info("max_model_len %d: given", given)
    return given


def _resolve_rows(config: EngineConfig, device: torch.device) -> int:
    given = config.scheduler.max_num_batched_tokens
    if given is not None:
        logger.info("max_num_batched_tokens %d: given", given)
        return given
    default = DEFAULT_CPU_ROWS if device.type == "cpu" else DEFAULT_ACCELERATOR_ROWS
    rows = max(default, config.scheduler.max_num_seqs)
    logger.info("max_num_batched_tokens %d: default on %s", rows, device.type)
    return rows


def _resolve_prefill_rows(config: EngineConfig, device: torch.device, step_rows: int) -> int:
    """On a CPU a step costs by its rows: prompts must leave the gaps of others short."""
    given = config.scheduler.max_prefill_while_decoding
    default = DEFAULT_CPU_PREFILL_ROWS if device.type == "cpu" else step_rows
    rows = min(default if given is None else given, step_rows)
    how = f"default on {device.type}" if given is None else "given"
    logger.info("max_prefill_while_decoding %d: %s", rows, how)
    return rows


def _resolve_blocks(
    config: EngineConfig, layers: Sequence[KVLayerShape], dtype: torch.dtype
) -> tuple[int, int]:
    given = config.cache.kv_cache_memory
    total = DEFAULT_KV_CACHE_BYTES if given is None else parse_bytes("--kv-cache-memory", given)
    size = config.cache.kv_block_size
    per_block = compute_block_bytes(layers, kv_block_size=size, dtype=dtype)
    num_blocks = total // per_block
    if num_blocks < 2:
        raise ConfigError(
            f"--kv-cache-memory {given} holds {num_blocks} blocks of {per_block} bytes; at least "
            f"2 are needed. Give {2 * per_block} bytes or more."
        )
    logger.info(
        "KV pool %d MiB: %s; %d blocks of %d tokens",
        total >> 20,
        "default" if given is None else "given",
        num_blocks - 1,
        size,
    )
    return total, num_blocks

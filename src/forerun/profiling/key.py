"""What a cost profile is valid for: everything that changes what a step costs, as text.

A profile measured under another key is not used. Names are what a person reads in the reason.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

import forerun
from forerun.config import EngineConfig
from forerun.engine.resolve import Resolved
from forerun.kernels import find_kernels
from forerun.kernels.cpu import read_cpu_name
from forerun.profiling.shapes import ProfileLimits
from forerun.speculative_config import MODEL_METHODS, SpeculativeConfig


def build_profile_key(
    config: EngineConfig,
    resolved: Resolved,
    model_path: Path,
    draft_model_path: Path | None = None,
) -> dict[str, str]:
    """Return the key of the profile that this engine needs."""
    kernels = find_kernels() if resolved.device.type == "cpu" else None
    facts = {
        "model": identify_model(model_path),
        "drafter": _describe_drafter(config.speculative),
        "draft model": "none" if draft_model_path is None else identify_model(draft_model_path),
        "draft tokens": config.speculative.max_draft_tokens,
        "verifier": config.speculative.rejection_sample_method,
        "dtype": _name(resolved.dtype),
        "KV dtype": _name(resolved.kv_dtype),
        "quantization": _describe_quantization(config, resolved),
        "device": _name_device(resolved.device),
        "threads": resolved.num_threads,
        "kernels": "none" if kernels is None else kernels.variant,
        "attention": resolved.attention_backend,
        "batch invariant": config.model.batch_invariant,
        "KV block size": config.cache.kv_block_size,
        "context": resolved.max_model_len,
        "rows per step": resolved.max_num_batched_tokens,
        "requests": config.scheduler.max_num_seqs,
        "torch": torch.__version__,
        "forerun": forerun.__version__,
    }
    return {name: str(value) for name, value in facts.items()}


def build_profile_limits(
    config: EngineConfig, resolved: Resolved, vocab_size: int
) -> ProfileLimits:
    """Return what there is to profile. Block 0 of the pool is the null block."""
    return ProfileLimits(
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=resolved.max_model_len,
        max_draft_tokens=config.speculative.max_draft_tokens,
        num_kv_blocks=resolved.num_blocks - 1,
        kv_block_size=config.cache.kv_block_size,
        vocab_size=vocab_size,
    )


def identify_model(path: Path) -> str:
    """Return a name that changes with the files of a model: their names, sizes and times."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    facts = [(file.name, file.stat()) for file in files if file.is_file()]
    listing = "\n".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in facts)
    digest = hashlib.sha256(listing.encode()).hexdigest()[:12]
    return f"{path.name} ({digest})"


def _describe_drafter(config: SpeculativeConfig) -> str:
    if config.method == "ngram":
        return f"ngram of {config.prompt_lookup_min} to {config.prompt_lookup_max} tokens"
    if config.method in MODEL_METHODS:
        return f"{config.method.replace('_', ' ')}, {config.draft_sample_method}"
    return config.method


def _describe_quantization(config: EngineConfig, resolved: Resolved) -> str:
    is_q8_0 = config.model.quantization == "q8_0"
    return "q8_0" if is_q8_0 else resolved.quantization


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _name_device(device: torch.device) -> str:
    if device.type == "cpu":
        return read_cpu_name()
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return str(device)

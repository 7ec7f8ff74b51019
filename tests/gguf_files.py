"""GGUF files of tiny random models for tests, in any stored types.

Names and conversions come from the gguf package and from the formats' definitions, not from the
code under test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from forerun.models.spec import ModelSpec
from quantised_blocks import fill_blocks
from tiny_models import make_model, make_spec, save_hf_model

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
ARCHS = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
}
Edit = Callable[[gguf.GGUFWriter], None]


def convert_weight(family: str, name: str, weight: np.ndarray, spec: ModelSpec) -> np.ndarray:
    """Apply what the file format of a family changes: row order of q and k, norms plus one."""
    if family == "gemma3" and name.endswith("norm.weight"):
        return weight + 1
    heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads}
    part = name.split(".")[-2]
    if family == "llama" and part in heads:
        halves = weight.reshape(heads[part], 2, spec.head_dim // 2, *weight.shape[1:])
        return halves.swapaxes(1, 2).reshape(weight.shape)
    return weight


def store(values: np.ndarray, kind: Kind) -> np.ndarray:
    """Return numbers in a stored type; K-quants, which the package only reads, become random."""
    try:
        return gguf.quantize(values, kind)
    except NotImplementedError:
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        rng = np.random.default_rng(values.size)
        count = values.size // block_size
        scale = 0.0001 if kind == Kind.Q6_K else 0.0005  # weights of a few tenths
        blocks = fill_blocks(count, block_bytes, kind.name, rng, fill=None, scale=scale)
        return blocks.reshape(len(values), -1)


def write_gguf(
    path: Path,
    family: str,
    weights: dict[str, np.ndarray],
    spec: ModelSpec,
    *,
    kind: Kind = Kind.F32,
    kinds: Mapping[str, Kind] | None = None,
    edit: Edit = lambda _writer: None,
) -> Path:
    """Write weights (by their Hugging Face names); matrices in `kind`, vectors in F32.

    `kinds` are those of single tensors, by the file's names without block number and suffix.
    """
    writer = gguf.GGUFWriter(path, family)
    for key, value in {
        "block_count": spec.num_layers,
        "context_length": spec.max_model_len,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": spec.intermediate_size,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.sliding_window": spec.layers[0].window or 4096,
    }.items():
        writer.add_uint32(f"{family}.{key}", value)
    writer.add_float32(f"{family}.attention.layer_norm_rms_epsilon", spec.rms_norm_eps)
    writer.add_float32(f"{family}.rope.freq_base", spec.layers[-1].rope.theta)
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(spec.vocab_size)])
    writer.add_array("tokenizer.ggml.scores", [float(i) for i in range(spec.vocab_size)])
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    writer.add_uint32("tokenizer.ggml.eot_token_id", 7)
    names = gguf.get_tensor_name_map(ARCHS[family], spec.num_layers)
    for name, weight in weights.items():
        stored_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        converted = convert_weight(family, name, weight, spec)
        stored_kind = (kinds or {}).get(stored_name.split(".")[-2], kind)
        stored_kind = stored_kind if converted.ndim > 1 else Kind.F32
        data = store(converted.astype(np.float32), stored_kind)
        writer.add_tensor(stored_name, data, raw_dtype=stored_kind)
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def make_pair(tmp_path: Path, family: str, **overrides: Any) -> tuple[dict, ModelSpec]:
    """Save a Hugging Face folder; return its weights by name and its spec."""
    model = save_hf_model(tmp_path / "hf", family, **SIZES, **overrides)
    spec = make_spec(family, **SIZES, **overrides)
    weights = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
    return weights, spec


def make_gemma_layers(family: str) -> dict[str, Any]:
    """The window pattern of GGUF files is fixed at six layers."""
    if family != "gemma3":
        return {}
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    return {"num_hidden_layers": 6, "layer_types": kinds, "query_pre_attn_scalar": 16}


def add_metadata(key: str, value: object) -> Edit:
    """Return an edit that adds one key."""

    def edit(writer: gguf.GGUFWriter) -> None:
        kinds = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        kinds[type(value)](key, value)

    return edit


def add_tensor(name: str, data: np.ndarray, kind: Kind | None = None) -> Edit:
    """Return an edit that adds one tensor."""
    return lambda writer: writer.add_tensor(name, data, raw_dtype=kind)


def write_random(
    path: Path,
    family: str = "llama",
    *,
    kind: Kind = Kind.Q8_0,
    kinds: Mapping[str, Kind] | None = None,
    drop_head: bool = False,
    change: Callable[[dict[str, np.ndarray]], None] = lambda _weights: None,
    **overrides: Any,
) -> Path:
    """Write a tiny random model, `change`d before; `overrides` are config.json keys."""
    sizes = {**SIZES, **make_gemma_layers(family), **overrides}
    model = make_model(family, pack=False, **sizes)
    weights = {
        model.hf_name(name): slot.destination.reshape(-1, *slot.shape)[0].numpy()
        for name, slot in model.slots().items()
        if not (drop_head and name == "head.weight")
    }
    change(weights)
    spec = make_spec(family, **sizes)
    return write_gguf(path, family, weights, spec, kind=kind, kinds=kinds)

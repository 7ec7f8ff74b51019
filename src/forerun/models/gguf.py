"""What a GGUF file says about a model: weight names and metadata as ModelSpec arguments."""

from __future__ import annotations

from collections import Counter
from typing import Any

from forerun.errors import ConfigError
from forerun.gguf_file import GGUFFile
from forerun.models.spec import Fields, LayerSpec, RopeSpec

_PARTS = {
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "input_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    "post_attention_norm": "post_attention_norm",
    "post_mlp_norm": "post_ffw_norm",
}
_OUTSIDE = {
    "embed.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "head.weight": "output.weight",
}
ROPE_FREQS = "rope_freqs.weight"


def read_metadata(file: GGUFFile) -> Fields:
    """Return checked access to a file's metadata."""
    return Fields(file.metadata, file.path.name)


def read_architecture(file: GGUFFile) -> str:
    """Return llama.cpp's name of the architecture."""
    return read_metadata(file).text("general.architecture")


def gguf_name(name: str) -> str:
    """Return the GGUF name of a local weight name."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    _, index, part, kind = name.split(".")
    return f"blk.{index}.{_PARTS[part]}.{kind}"


def read_gguf_fields(file: GGUFFile) -> dict[str, Any]:
    """Return the ModelSpec arguments that all families read the same way."""
    from forerun.models import GGUF_ARCHITECTURES

    arch, meta, tensors = read_architecture(file), read_metadata(file), file.tensors
    hidden_size = meta.integer(f"{arch}.embedding_length")
    num_heads = meta.integer(f"{arch}.attention.head_count")
    head_dim = meta.integer(f"{arch}.attention.key_length", hidden_size // num_heads)
    sizes = {
        "hidden_size": hidden_size,
        "intermediate_size": meta.integer(f"{arch}.feed_forward_length"),
        "num_heads": num_heads,
        "num_kv_heads": meta.integer(f"{arch}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
    }
    num_layers = meta.integer(f"{arch}.block_count")
    _check_sizes(file, sizes, num_layers)
    layer = LayerSpec(window=None, rope=_read_rope(file, head_dim))
    bos = meta.token_ids("tokenizer.ggml.bos_token_id")
    eos = [meta.token_ids(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")]
    return {
        "architecture": GGUF_ARCHITECTURES[arch],
        **sizes,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "max_model_len": meta.integer(f"{arch}.context_length"),
        "rms_norm_eps": meta.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        "attention_scale": head_dim**-0.5,
        "layers": (layer,) * num_layers,
        # A separate output.weight is quantised on its own, so a tied config does not count.
        "tie_word_embeddings": "output.weight" not in tensors,
        "qkv_bias": "blk.0.attn_q.bias" in tensors,
        "o_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "bos_token_id": bos[0] if bos else None,
        "eos_token_ids": tuple(dict.fromkeys(eos[0] + eos[1])),
        "quantization": _main_type(file),
    }


def _check_sizes(file: GGUFFile, sizes: dict[str, int], num_layers: int) -> None:
    """Raise ConfigError if metadata and tensors differ in size.

    Before anything is made of these sizes: a damaged one could ask for terabytes.
    """
    hidden_size, head_dim = sizes["hidden_size"], sizes["head_dim"]
    expected = {
        "token_embd": None,
        "blk.0.attn_q": sizes["num_heads"] * head_dim,
        "blk.0.attn_k": sizes["num_kv_heads"] * head_dim,
        "blk.0.ffn_gate": sizes["intermediate_size"],
        f"blk.{num_layers - 1}.attn_q": sizes["num_heads"] * head_dim,
    }
    for name, num_rows in expected.items():
        tensor = file.tensors.get(f"{name}.weight")
        if tensor is None:
            raise ConfigError(f"{file.path} lacks tensor {name}.weight; it is incomplete.")
        wanted = (tensor.shape[0] if num_rows is None else num_rows, hidden_size)
        if tensor.shape != wanted:
            raise ConfigError(
                f"{file.path}: tensor {tensor.name} has shape {list(tensor.shape)}; the metadata "
                f"says {list(wanted)}."
            )


def _main_type(file: GGUFFile) -> str:
    """Return the type most weights of the layers are stored in."""
    sizes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        if tensor.name.startswith("blk."):
            sizes[tensor.type_name] += tensor.num_rows * tensor.shape[-1]
    return sizes.most_common(1)[0][0] if sizes else "F32"


def _read_rope(file: GGUFFile, head_dim: int) -> RopeSpec:
    arch, meta = read_architecture(file), read_metadata(file)
    rotated = meta.integer(f"{arch}.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise meta.error(f"{arch}.rope.dimension_count", rotated, f"the head size {head_dim}")
    theta = meta.number(f"{arch}.rope.freq_base", 10_000.0)
    kind = meta.text(f"{arch}.rope.scaling.type", "none")
    if kind == "linear":
        factor = meta.number(f"{arch}.rope.scaling.factor", 1.0)
        return RopeSpec(theta=theta, freq_factors=(factor,) * (head_dim // 2))
    if kind != "none":
        raise meta.error(f"{arch}.rope.scaling.type", kind, "none or linear")
    table = file.tensors.get(ROPE_FREQS)
    if table is None:
        return RopeSpec(theta=theta)
    if table.shape != (head_dim // 2,):
        raise ConfigError(
            f"{file.path.name}: tensor {ROPE_FREQS} has shape {list(table.shape)}; the model needs "
            f"[{head_dim // 2}]."
        )
    return RopeSpec(theta=theta, freq_factors=tuple(file.read_rows(table, 0, 1)[0].tolist()))

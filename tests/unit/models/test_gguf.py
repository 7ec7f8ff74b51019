"""GGUF files: equal to the Hugging Face folder of the same weights, and every defect refused.

Names and conversions come from the gguf package and from the formats' definitions, not from the
code under test.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from forerun.errors import ConfigError
from forerun.gguf_file import read_gguf
from forerun.models.loader import load_model, read_model_spec
from gguf_files import Edit, add_metadata, add_tensor, make_gemma_layers, make_pair, write_gguf
from quantised_blocks import fill_blocks
from tiny_models import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_folder_of_the_same_weights(family: str, tmp_path: Path) -> None:
    weights, spec = make_pair(tmp_path, family, **make_gemma_layers(family))
    path = write_gguf(tmp_path / "m.gguf", family, weights, spec)
    from_gguf = load_model(path, dtype=torch.float32, pack=False)
    from_folder = load_model(tmp_path / "hf", dtype=torch.float32, pack=False)
    for (name, left), right in zip(
        from_gguf.named_parameters(), from_folder.parameters(), strict=True
    ):
        assert torch.equal(left, right), name
    read, expected = read_model_spec(path), read_model_spec(tmp_path / "hf")
    assert read.layers == expected.layers
    assert read.attention_scale == expected.attention_scale
    assert (read.activation, read.qkv_bias, read.qk_norm, read.post_norms, read.embed_scale) == (
        expected.activation,
        expected.qkv_bias,
        expected.qk_norm,
        expected.post_norms,
        expected.embed_scale,
    )
    assert read.eos_token_ids == (2, 7)


@pytest.mark.parametrize(
    "kind", [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]
)
def test_dequantises_to_the_stored_values(kind: Kind, tmp_path: Path) -> None:
    weights, spec = make_pair(tmp_path, "qwen2")
    path = write_gguf(tmp_path / "m.gguf", "qwen2", weights, spec, kind=kind)
    model = load_model(path, dtype=torch.float32, pack=False)
    for name, slot in model.slots().items():
        weight = weights[model.hf_name(name)]
        if weight.ndim > 1:
            weight = gguf.dequantize(gguf.quantize(weight, kind), kind)
        assert torch.equal(slot.destination, torch.from_numpy(weight)), name
    assert read_model_spec(path).quantization == kind.name


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
def test_reads_k_quants_row_by_row(kind: Kind, tmp_path: Path) -> None:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = fill_blocks(12, size, kind.name, np.random.default_rng(0), fill=None).reshape(6, -1)
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("padding", np.ones(3, np.float32))
    writer.add_tensor("w", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(path)
    assert file.tensors["w"].shape == (6, 2 * block)
    expected = gguf.dequantize(raw, kind)
    np.testing.assert_array_equal(file.read_rows(file.tensors["w"], 2, 5), expected[2:5])


def test_large_tensors_are_filled_in_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, spec = make_pair(tmp_path, "llama")
    path = write_gguf(tmp_path / "m.gguf", "llama", weights, spec, kind=Kind.Q8_0)
    whole = load_model(path, dtype=torch.float32, pack=False)
    monkeypatch.setattr("forerun.models.gguf_tensors._CHUNK_NUMBERS", 5 * 64)
    calls: list[tuple[int, int]] = []
    chunked = load_model(
        path,
        dtype=torch.float32,
        progress=lambda done, total: calls.append((done, total)),
        pack=False,
    )
    for left, right in zip(whole.parameters(), chunked.parameters(), strict=True):
        assert torch.equal(left, right)
    total = calls[-1][1]
    assert total > len(weights)
    assert [done for done, _ in calls] == list(range(1, total + 1))


def test_head_is_tied_only_where_the_file_has_none(tmp_path: Path) -> None:
    weights, spec = make_pair(tmp_path, "qwen2")
    untied = write_gguf(tmp_path / "a.gguf", "qwen2", weights, spec)
    weights.pop("lm_head.weight")
    tied = write_gguf(tmp_path / "b.gguf", "qwen2", weights, spec)
    assert not read_model_spec(untied).tie_word_embeddings
    model = load_model(tied, dtype=torch.float32)
    assert model.head.table is model.embed.table


def test_frequency_factors_equal_the_llama3_scaling_they_come_from(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    weights, spec = make_pair(tmp_path, "llama", rope_parameters=scaling)
    factors = spec.layers[0].rope.freq_factors
    assert factors is not None

    def add_factors(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))

    path = write_gguf(tmp_path / "m.gguf", "llama", weights, spec, edit=add_factors)
    load_model(path, dtype=torch.float32)
    assert read_model_spec(path).layers[0].rope.freq_factors == pytest.approx(factors)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (add_metadata("split.count", 3), "one part of a split model"),
        (add_metadata("llama.rope.scaling.type", "yarn"), "scaling.type = 'yarn'; it must be none"),
        (add_metadata("llama.rope.dimension_count", 4), "must be the head size 16"),
        (add_tensor("blk.0.extra.weight", np.ones(3, np.float32)), "tensor blk.0.extra.weight"),
        (add_tensor("rope_freqs.weight", np.ones(3, np.float32)), r"has shape \[3\]"),
        (
            add_tensor("odd", np.zeros((1, 66), np.uint8), Kind.IQ2_XXS),
            "tensor odd is stored as IQ2_XXS, which is not supported; supported are F32, F16",
        ),
    ],
)
def test_unusable_contents_are_refused(edit: Edit, message: str, tmp_path: Path) -> None:
    weights, spec = make_pair(tmp_path, "llama")
    path = write_gguf(tmp_path / "m.gguf", "llama", weights, spec, edit=edit)
    with pytest.raises(ConfigError, match=message):
        load_model(path, dtype=torch.float32)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    weights, spec = make_pair(tmp_path, "llama")
    weights.pop("model.layers.1.mlp.down_proj.weight")
    path = write_gguf(tmp_path / "m.gguf", "llama", weights, spec)
    with pytest.raises(ConfigError, match=r"lacks tensor blk\.1\.ffn_down\.weight"):
        load_model(path, dtype=torch.float32)


def test_wrong_shapes_are_named(tmp_path: Path) -> None:
    weights, spec = make_pair(tmp_path, "llama")
    weights["model.norm.weight"] = np.ones(9, np.float32)
    path = write_gguf(tmp_path / "m.gguf", "llama", weights, spec)
    with pytest.raises(ConfigError, match=r"output_norm\.weight has shape \[9\].*says \[64\]"):
        load_model(path, dtype=torch.float32)


def test_missing_metadata_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.ones((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="lacks 'llama.embedding_length'"):
        read_model_spec(path)


def test_unknown_architecture_is_refused(tmp_path: Path) -> None:
    weights, spec = make_pair(tmp_path, "llama")
    path = write_gguf(tmp_path / "m.gguf", "llama", weights, spec)
    path.write_bytes(path.read_bytes().replace(b"llama", b"mamba"))
    with pytest.raises(ConfigError, match="architecture 'mamba' is not supported; supported are"):
        read_model_spec(path)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    weights, spec = make_pair(tmp_path, "llama")
    path = write_gguf(tmp_path / "m.gguf", "llama", weights, spec)
    whole = path.read_bytes()
    for size in (*range(0, 4000, 7), len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match="truncated or corrupt|not a GGUF"):
            load_model(path, dtype=torch.float32)


def test_flipped_header_bytes_never_crash(tmp_path: Path) -> None:
    """Any byte of the header may be wrong: the answer is a ConfigError or a readable header."""
    weights, spec = make_pair(tmp_path, "llama")
    path = write_gguf(tmp_path / "m.gguf", "llama", weights, spec)
    whole = path.read_bytes()
    refused = 0
    for position in range(0, 5500, 11):
        damaged = bytearray(whole)
        damaged[position] ^= 0xFF
        path.write_bytes(damaged)
        try:
            read_model_spec(path)
        except ConfigError:
            refused += 1
    assert refused > 50


def test_other_files_are_not_gguf(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"hello, this is text")
    with pytest.raises(ConfigError, match="not a GGUF file"):
        read_model_spec(path)

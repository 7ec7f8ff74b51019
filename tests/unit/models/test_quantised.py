"""Quantised weights in a model: held as stored, in our order, and what cannot be is dequantised.

With the native kernels and, where the reference multiplies, without.
"""

from __future__ import annotations

import logging
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from forerun import kernels
from forerun.errors import ConfigError
from forerun.gguf_file import read_gguf
from forerun.models.block_plan import measure_blocks
from forerun.models.decoder import DecoderModel
from forerun.models.loader import load_model
from gguf_files import write_random
from quantised_blocks import make_blocks
from tiny_models import FAMILIES, PagedRunner, save_hf_model

BLOCKS_OF_32 = [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1]
K_QUANTS = [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K]
# Every row a whole number of K-quant blocks.
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}


@pytest.fixture(autouse=True, params=["native", "reference"])
def path_taken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Choose what multiplies; let log lines be seen."""
    monkeypatch.setattr(logging.getLogger("forerun"), "propagate", True)
    if request.param == "reference":
        monkeypatch.setattr(kernels, "_probe", lambda: (None, "switched off"))
    elif measure_blocks([make_blocks("Q8_0", 16, 32)]) is None:
        pytest.skip(f"no kernels for quantised weights: {kernels.explain_kernels()}")
    return str(request.param)


def load(path: Path, quantization: str, dtype: torch.dtype = torch.float32) -> DecoderModel:
    """Load a model whose weights, where they are not held in blocks, can be read."""
    is_exact = quantization == "exact"
    return load_model(path, dtype=dtype, quantization=quantization, pack=not is_exact)


def list_plain(model: DecoderModel) -> list[str]:
    """Return the names of the parts of all layers that are not held in blocks."""
    parts = list(model.linear_parts())
    assert all(linear.weight is None for linear, _ in parts if linear.is_quantised)
    return [name for linear, names in parts if not linear.is_quantised for name in names]


def check_same_weights(int8: DecoderModel, exact: DecoderModel) -> None:
    """Whatever is held how, every layer has the same numbers in the same places."""
    for (held, names), (plain, _) in zip(int8.linear_parts(), exact.linear_parts(), strict=True):
        rows = torch.arange(plain.out_features)
        assert torch.equal(held.read_rows(rows), plain.read_rows(rows)), names


def compute_logits(model: DecoderModel) -> torch.Tensor:
    runner = PagedRunner(model)
    (logits,), _ = runner.step([(runner.add([7 * i % 90 for i in range(20)]), 20)])
    return logits


def check_near(int8: DecoderModel, exact: DecoderModel, max_kl: float = 0.02) -> None:
    """8-bit activations change distributions a little, and do change them."""
    log_p, log_q = (compute_logits(model).log_softmax(-1) for model in (exact, int8))
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    assert 1e-9 < kl.mean() < max_kl
    assert log_p.std() > 0.5  # there is something to be near to


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_holds_its_weights_as_stored(family: str, tmp_path: Path) -> None:
    path = write_random(tmp_path / "m.gguf", family, kind=Kind.Q4_1)
    int8, exact = load(path, "int8"), load(path, "exact")
    assert list_plain(int8) == []
    check_same_weights(int8, exact)
    check_near(int8, exact)


@pytest.mark.parametrize("kind", BLOCKS_OF_32)
def test_formats_in_blocks_of_32(kind: Kind, tmp_path: Path) -> None:
    path = write_random(tmp_path / "m.gguf", kind=kind)
    int8, exact = load(path, "int8"), load(path, "exact")
    assert list_plain(int8) == []
    assert set(int8.count_weight_types()) == {kind.name}
    check_same_weights(int8, exact)
    check_near(int8, exact)


@pytest.mark.parametrize("kind", K_QUANTS)
def test_k_quants(kind: Kind, tmp_path: Path) -> None:
    path = write_random(tmp_path / "m.gguf", kind=kind, **WIDE)
    int8, exact = load(path, "int8"), load(path, "exact")
    assert list_plain(int8) == []
    check_same_weights(int8, exact)
    check_near(int8, exact)


def test_parts_of_a_merged_layer_may_differ(tmp_path: Path) -> None:
    kinds = {"attn_q": Kind.Q5_0, "attn_k": Kind.Q8_0, "ffn_up": Kind.Q4_0, "token_embd": Kind.Q5_1}
    path = write_random(tmp_path / "m.gguf", kind=Kind.Q4_1, kinds=kinds)
    int8, exact = load(path, "int8"), load(path, "exact")
    assert list_plain(int8) == []
    check_same_weights(int8, exact)
    check_near(int8, exact)
    q, kv = 64 * 64, 32 * 64
    per_layer = {"Q5_0": q, "Q8_0": kv, "Q4_0": 96 * 64, "Q4_1": kv + q + 2 * 96 * 64}
    counts = int8.count_weight_types()
    assert counts.pop("Q5_1") == 97 * 64
    assert counts.pop("Q4_1") == 2 * per_layer.pop("Q4_1") + 97 * 64
    assert counts == {name: 2 * number for name, number in per_layer.items()}
    assert sum(exact.count_weight_types().values()) == sum(int8.count_weight_types().values())


def test_a_tied_table_is_held_once(tmp_path: Path) -> None:
    path = write_random(tmp_path / "m.gguf", kind=Kind.Q8_0, drop_head=True)
    model = load(path, "int8")
    assert model.head.table is model.embed.table
    assert model.head.table.is_quantised
    check_near(model, load(path, "exact"))


def test_biases_stay(tmp_path: Path) -> None:
    path = write_random(tmp_path / "m.gguf", "qwen2", kind=Kind.Q8_0)
    int8, exact = load(path, "int8"), load(path, "exact")
    qkv = int8.layers[0].attention.qkv
    assert qkv.packed_bias is not None
    assert torch.equal(qkv.packed_bias, exact.layers[0].attention.qkv.bias.data)
    zeros = torch.zeros(1, 64)
    assert torch.equal(qkv(zeros)[0], qkv.packed_bias)
    check_near(int8, exact)


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q3_K])
def test_an_unsupported_type_is_dequantised_with_one_line(
    kind: Kind, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = {"attn_v": kind, "ffn_down": kind, "output": Kind.F16}
    path = write_random(tmp_path / "m.gguf", kind=Kind.Q8_0, kinds=kinds, **WIDE)
    with caplog.at_level(logging.INFO, logger="forerun"):
        int8 = load(path, "int8")
    (record,) = caplog.records
    assert "3 of 6 linear layers and tables are computed in float32" in record.message
    assert f"stored as {kind.name} (2); stored as F16 (1)" in record.message
    parts = [f"layers.0.{part}.weight" for part in ("q", "k", "v", "down")]
    assert list_plain(int8) == [*parts, "head.weight"]
    exact = load(path, "exact")
    check_same_weights(int8, exact)
    check_near(int8, exact)
    assert int8.count_weight_types().keys() == {"float32", "Q8_0"}


@pytest.mark.parametrize("quantization", ["exact", "int8"])
@pytest.mark.parametrize("kind", [*BLOCKS_OF_32, *K_QUANTS, Kind.Q2_K, Kind.Q3_K])
def test_scales_that_are_not_finite_are_refused_in_both_modes(
    kind: Kind, quantization: str, tmp_path: Path
) -> None:
    path = write_random(tmp_path / "m.gguf", kind=Kind.Q8_0, kinds={"ffn_up": kind}, **WIDE)
    tensor = read_gguf(path).tensors["blk.0.ffn_up.weight"]
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    block = tensor.offset + 37 * block_bytes
    place = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}.get(kind.name, 0)
    damaged = bytearray(path.read_bytes())
    damaged[block + place : block + place + 2] = np.array([np.nan], "<f2").tobytes()
    path.write_bytes(damaged)
    message = rf"blk\.0\.ffn_up\.weight \({kind.name}\).*NaN in the block at byte {block};"
    with pytest.raises(ConfigError, match=message):
        load(path, quantization)


def test_blocks_that_do_not_fill_a_row_are_refused(tmp_path: Path) -> None:
    path = write_random(tmp_path / "m.gguf", kind=Kind.Q8_0)
    tensor = read_gguf(path).tensors["blk.1.ffn_up.weight"]
    data = bytearray(path.read_bytes())
    at = data.index(b"blk.1.ffn_up.weight") + len("blk.1.ffn_up.weight") + 4 + 2 * 8
    data[at] = Kind.Q4_K.value
    path.write_bytes(data)
    message = (
        rf"blk\.1\.ffn_up\.weight \(Q4_K \[96, 64\], at byte {tensor.offset}\) .*blocks of 256"
    )
    with pytest.raises(ConfigError, match=message):
        load(path, "int8")


def test_progress_counts_layers_held_in_blocks(tmp_path: Path) -> None:
    path = write_random(tmp_path / "m.gguf", kind=Kind.Q8_0)
    calls: list[tuple[int, int]] = []

    def report(done: int, total: int) -> None:
        calls.append((done, total))

    load_model(path, dtype=torch.float32, quantization="int8", progress=report)
    # Five norms, four layers in each of two blocks, two tables.
    assert calls == [(done, 15) for done in range(1, 16)]


def test_pages_of_the_file_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_random(tmp_path / "m.gguf", kind=Kind.Q8_0)
    for quantization in ("exact", "int8"):
        file = read_gguf(path)
        released: set[str] = set()

        def record(self: object, tensor: object, *rows: int, names: set[str] = released) -> None:
            names.add(tensor.name)  # type: ignore[attr-defined]

        monkeypatch.setattr(type(file), "release_rows", record)
        load(path, quantization)
        assert released == set(file.tensors)


def test_released_rows_can_be_read_again(tmp_path: Path) -> None:
    file = read_gguf(write_random(tmp_path / "m.gguf", kind=Kind.Q8_0))
    for tensor in file.tensors.values():
        before = file.read_raw(tensor, 0, tensor.num_rows).copy()
        file.release_rows(tensor, 0, tensor.num_rows)
        np.testing.assert_array_equal(file.read_raw(tensor, 0, tensor.num_rows), before)


def test_a_bfloat16_model_computes_near_a_float32_one(tmp_path: Path) -> None:
    path = write_random(tmp_path / "m.gguf", kind=Kind.Q4_1)
    low, high = load(path, "int8", torch.bfloat16), load(path, "int8")
    assert low.embed(torch.arange(5)).dtype == torch.bfloat16
    check_near(low, high, max_kl=0.05)


@pytest.mark.parametrize("tied", [False, True])
def test_q8_0_of_a_safetensors_folder(tied: bool, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    save_hf_model(tmp_path, "llama", tie_word_embeddings=tied, **sizes)
    made, exact = load(tmp_path, "q8_0"), load(tmp_path, "exact")
    assert list_plain(made) == []
    assert set(made.count_weight_types()) == {"Q8_0"}
    for (held, _), (plain, _) in zip(made.linear_parts(), exact.linear_parts(), strict=True):
        stored = gguf.quantize(plain.plain_weight.numpy(), Kind.Q8_0)
        expected = torch.from_numpy(gguf.dequantize(stored, Kind.Q8_0))
        assert torch.equal(held.read_rows(torch.arange(plain.out_features)), expected)
    check_near(made, exact)


def test_q8_0_of_a_gguf_file_keeps_what_is_quantised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.models.gguf_tensors._CHUNK_NUMBERS", 5 * 64)
    floats = {"attn_q": Kind.F16, "ffn_down": Kind.BF16, "output": Kind.F32}

    def make_short(weights: dict[str, np.ndarray]) -> None:
        for weight in weights.values():
            weight[:] = np.round(weight * 64) / 64  # the same numbers in every float type

    mixed = write_random(tmp_path / "a.gguf", kind=Kind.Q4_1, kinds=floats, change=make_short)
    model = load(mixed, "q8_0")
    assert list_plain(model) == []
    assert model.count_weight_types().keys() == {"Q4_1", "Q8_0"}
    as_stored = load(mixed, "int8")
    assert as_stored.count_weight_types().keys() == {"Q4_1", "float32"}
    kinds = dict.fromkeys(floats, Kind.Q8_0)
    made = write_random(tmp_path / "b.gguf", kind=Kind.Q4_1, kinds=kinds, change=make_short)
    check_same_weights(model, load(made, "exact"))


def test_rows_that_blocks_do_not_divide_stay_as_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_hf_model(tmp_path, "llama", hidden_size=64, head_dim=16, intermediate_size=80)
    with caplog.at_level(logging.INFO, logger="forerun"):
        model = load(tmp_path, "q8_0")
    (record,) = caplog.records
    assert "2 of 10" in record.message
    assert "80 numbers in a row, no multiple of 32 (2)" in record.message
    assert list_plain(model) == [f"layers.{i}.down.weight" for i in range(2)]
    check_near(model, load(tmp_path, "exact"))


def test_parts_that_do_not_fill_whole_vectors_are_dequantised(
    path_taken: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_random(tmp_path / "m.gguf", head_dim=8, num_key_value_heads=1)
    with caplog.at_level(logging.WARNING, logger="forerun"):
        model = load(path, "int8")
    if path_taken == "reference":
        assert list_plain(model) == []
    else:
        (record,) = caplog.records
        assert "parts of 32 + 8 + 8 rows (2)" in record.message
        assert list_plain(model) == [
            f"layers.{i}.{part}.weight" for i in range(2) for part in "qkv"
        ]
    check_near(model, load(path, "exact"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_cannot_be_quantised(value: float, tmp_path: Path) -> None:
    def damage(weights: dict[str, np.ndarray]) -> None:
        weights["model.layers.1.mlp.up_proj.weight"][3, 4] = value

    path = write_random(tmp_path / "m.gguf", kind=Kind.F16, change=damage)
    load(path, "exact")
    with pytest.raises(
        ConfigError, match=r"blk\.1\.ffn_up\.weight has weights that are NaN or inf"
    ):
        load(path, "q8_0")


def test_layers_in_blocks_never_switch_to_onednn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneDNN would multiply them with activations that are not quantised."""
    monkeypatch.setattr("forerun.models.decoder.measure_crossover", lambda _linear: 64)
    model = load(write_random(tmp_path / "m.gguf", kind=Kind.Q8_0), "int8")
    assert model.measure_crossover() is None

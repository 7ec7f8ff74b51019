"""Drafters on disk: round trips, what is left out, and a clear refusal for every defect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark_networks import (
    WEIGHTS,
    deepspec_values,
    make_batch,
    make_config,
    make_network,
    make_tensors,
    speculators_values,
    write_drafter,
)
from forerun.drafters.dspark import checkpoint
from forerun.drafters.dspark.checkpoint import (
    check_target,
    load_dspark_tensors,
    load_network,
    read_dspark_config,
    save_checkpoint,
)
from forerun.errors import ConfigError

CONFIG = make_config(verifier="org/Target-1B")
ROUND_TRIPS = {
    "full_vocabulary": CONFIG,
    "reduced_vocabulary": make_config(draft_vocab_size=20),
    "gated": make_config(markov_head_type="gated", draft_vocab_size=20),
    "rnn": make_config(markov_head_type="rnn", confidence_bias=False),
    "dflash": make_config(markov_rank=0, has_confidence_head=False),
    "legacy": make_config(sample_from_anchor=False, confidence_with_markov=False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_what_is_saved_is_what_is_loaded(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config = ROUND_TRIPS[name]
    network = make_network(config)
    save_checkpoint(tmp_path, network, dtype=dtype)
    assert read_dspark_config(tmp_path) == config
    restored = load_network(tmp_path)
    expected = network.state_dict()
    for weight, tensor in restored.state_dict().items():
        rounded = expected[weight].to(dtype) if tensor.is_floating_point() else expected[weight]
        assert torch.equal(tensor, rounded.to(tensor.dtype)), weight
    if dtype == torch.float32:
        batch = make_batch(config)
        assert torch.equal(restored(batch), network(batch))


@pytest.mark.parametrize(
    ("vocab_size", "includes_head", "written"),
    [(61, True, set()), (20, True, {"lm_head.weight"}), (20, False, set())],
)
def test_the_targets_tables_are_left_out(
    tmp_path: Path, vocab_size: int, includes_head: bool, written: set[str]
) -> None:
    """But for the rows of a reduced head, without which vLLM loads no such drafter."""
    config = make_config(draft_vocab_size=vocab_size)
    network = make_network(config)
    embed, head = torch.randn(2, config.vocab_size, config.hidden_size)
    network.share_target(embed, head)
    save_checkpoint(tmp_path, network, dtype=torch.float32, includes_head=includes_head)
    tables = {"embed_tokens.weight", "lm_head.weight"}
    assert tables & load_file(tmp_path / WEIGHTS).keys() == written
    restored = load_network(tmp_path)
    restored.share_target(embed, head)
    batch = make_batch(config)
    assert torch.equal(restored(batch), network(batch))
    hidden = torch.randn(2, config.hidden_size)
    assert torch.equal(restored.compute_base_logits(hidden), network.compute_base_logits(hidden))


def test_the_written_dialect_is_the_one_of_speculators(tmp_path: Path) -> None:
    network = make_network(make_config(draft_vocab_size=20, sample_from_anchor=False))
    save_checkpoint(tmp_path, network, extra={"forerun_training": {"steps": 3}})
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["architectures"] == ["DSparkSpeculator"]
    assert values["speculators_model_type"] == "dspark"
    assert values["aux_hidden_state_layer_ids"] == [0, 2, 4]
    assert (values["block_size"], values["sample_from_anchor"]) == (6, False)
    proposal = values["speculators_config"]["proposal_methods"][0]
    assert proposal["speculative_tokens"] == 5
    assert values["forerun_training"] == {"steps": 3}
    tensors = load_file(tmp_path / WEIGHTS)
    own_ids = torch.arange(20)
    assert torch.equal(tensors["d2t"] + own_ids, network.d2t)
    assert torch.equal(tensors["t2d"].nonzero().flatten(), network.d2t)
    assert tensors["fc.weight"].dtype == torch.bfloat16


def test_an_interrupted_save_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_network(CONFIG)
    save_checkpoint(tmp_path, first, dtype=torch.float32)

    def break_off(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        path.write_bytes(b"half a")
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint, "save_file", break_off)
    with pytest.raises(OSError, match="no space"):
        save_checkpoint(tmp_path, make_network(CONFIG, seed=9))
    assert torch.equal(load_network(tmp_path).fc.weight, first.fc.weight)


def _write(folder: Path, **changes: Tensor | None) -> Path:
    """Write a drafter with a reduced vocabulary, some tensors changed (None: left out)."""
    config = make_config(draft_vocab_size=20)
    tensors: dict[str, Any] = make_tensors(config)
    tensors |= {"d2t": torch.full((20,), 3), "t2d": torch.zeros(61, dtype=torch.bool)}
    tensors["t2d"][3:23] = True
    tensors |= changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return write_drafter(folder, speculators_values(config), kept)


def _refuse(folder: Path, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_dspark_tensors(folder, read_dspark_config(folder))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fc.weight": None}, "lacks tensor fc.weight"),
        ({"markov_head.markov_w2.weight": None}, "lacks tensor markov_head.markov_w2.weight"),
        ({"d2t": None}, "lacks tensor d2t"),
        ({"layers.1.mlp.up_proj.weight": torch.zeros(3, 4)}, r"shape \[3, 4\].* \[40, 24\]"),
        # Two taps where the configuration names three.
        ({"fc.weight": torch.zeros(24, 48)}, r"fc.weight has shape \[24, 48\].* \[24, 72\]"),
        ({"layers.2.mlp.up_proj.weight": torch.zeros(1)}, "has tensor layers.2.*no place for"),
        ({"norm.weight": torch.zeros(24, dtype=torch.int8)}, "norm.weight is stored as int8"),
        ({"d2t": torch.zeros(20)}, "d2t is stored as float32"),
        ({"d2t": torch.full((20,), 60)}, "target id below 61"),
        ({"d2t": torch.full((20,), -1)}, "target id below 61"),
        ({"d2t": -2 * torch.arange(20) + 40}, "in rising order"),
        ({"d2t": torch.full((20,), 4)}, "d2t and t2d name different"),
    ],
)
def test_defective_tensors_are_refused(
    changes: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    _refuse(_write(tmp_path, **changes), message)


@pytest.mark.parametrize("num_bytes", [0, 5, 600, -40])
def test_a_truncated_file_is_refused(num_bytes: int, tmp_path: Path) -> None:
    weights = _write(tmp_path) / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:num_bytes])
    _refuse(tmp_path, "truncated or corrupt safetensors file")


def test_incomplete_folders_are_refused(tmp_path: Path) -> None:
    _refuse(tmp_path, "has no config.json")
    (tmp_path / "config.json").write_text(json.dumps(deepspec_values(CONFIG)))
    _refuse(tmp_path, "no .safetensors files")
    save_file(make_tensors(CONFIG), tmp_path / WEIGHTS)
    (tmp_path / "config.json").write_text("{")
    _refuse(tmp_path, "not valid JSON")


def test_a_mistake_in_the_configuration_names_the_folder(tmp_path: Path) -> None:
    values = deepspec_values(CONFIG) | {"markov_head_type": "attention"}
    _refuse(write_drafter(tmp_path, values, make_tensors(CONFIG)), tmp_path.name)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"hidden_size": 32}, "hidden size 24; this one has 32.*trained for org/Target-1B"),
        ({"vocab_size": 64}, "vocabulary size 61; this one has 64"),
        ({"num_layers": 4}, "taps layer 3; a target of 4 layers allows -1 to 2"),
    ],
)
def test_a_drafter_of_another_target_is_refused(target: dict[str, int], message: str) -> None:
    sizes = {"hidden_size": 24, "vocab_size": 61, "num_layers": 5}
    check_target(CONFIG, **sizes)
    with pytest.raises(ConfigError, match=message):
        check_target(CONFIG, **(sizes | target))

"""Block drafters from their folders: engines that load them, and what is refused."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from block_drafters import (
    Bench,
    list_tensors,
    make_config,
    make_drafter,
    make_network,
    make_target,
)
from fakes import collect_tokens, drain, new_request
from forerun.config import EngineConfig
from forerun.core import RequestOutput
from forerun.drafters import build_drafter, read_kv_layers
from forerun.drafters.base import DrafterLoading
from forerun.drafters.dspark.checkpoint import save_checkpoint
from forerun.drafters.dspark.config import DSparkConfig
from forerun.drafters.dspark.load import build_parts
from forerun.engine import build
from forerun.engine.engine import Engine
from forerun.errors import ConfigError
from forerun.kernels import find_kernels
from forerun.layers.linear import WeightOptions
from forerun.models.loader import load_model
from forerun.speculative_config import SpeculativeConfig
from gguf_files import write_random
from model_engines import NoEosTokenizer, make_model_engine

# What write_random makes: hidden size 64, so that everything can be held in blocks.
FILE_SIZES = {"hidden_size": 64, "vocab_size": 97, "draft_vocab_size": 48, "intermediate_size": 96}
LAYERS = {"target_layer_ids": (-1, 0)}


def write_pair(folder: Path, kind: Kind = Kind.F32, **overrides: object) -> tuple[Path, Path]:
    """Write a target and a drafter for it; return both paths."""
    target = write_random(folder / "m.gguf", "llama", kind=kind, vocab_size=97)
    model = load_model(target, dtype=torch.float32)
    config = make_config(**{**FILE_SIZES, **LAYERS, **overrides})
    drafter = folder / "drafter"
    save_checkpoint(drafter, make_network(config, model), dtype=torch.float32)
    return target, drafter


def speculate(model: Path | str, **fields: object) -> SpeculativeConfig:
    given = {"method": "dspark", "num_speculative_tokens": 5, "model": str(model), **fields}
    return SpeculativeConfig.from_dict(given)


@pytest.fixture
def byte_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of random models have no tokenizer: take the byte tokenizer."""
    monkeypatch.setattr(build, "load_tokenizer", lambda _: NoEosTokenizer())


def start(target: Path, speculative: dict[str, object], **options: object) -> Engine:
    config = EngineConfig.from_options(
        model=str(target),
        kv_cache_memory="4M",
        speculative_config=speculative,
        **{"dtype": "float32", **options},
    )
    return build.build_engine(config)[0]


def run(engine: Engine) -> list[RequestOutput]:
    for index, prompt in enumerate(([3, 4, 5], [9] * 20, [1, 2] * 6)):
        engine.add(
            new_request(f"r{index}", prompt, temperature=0.0, ignore_eos=True, max_tokens=24)
        )
    return drain(engine)


def count(outputs: Sequence[RequestOutput]) -> int:
    stats = [output.spec_stats for output in outputs if output.spec_stats is not None]
    return sum(s.num_draft_tokens for s in stats)


@pytest.mark.usefixtures("byte_tokenizer")
@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q4_1])
@pytest.mark.parametrize("method", ["dspark", "dflash"])
def test_an_engine_loads_a_drafter_from_its_folder(tmp_path: Path, method: str, kind: Kind) -> None:
    heads = {} if method == "dspark" else {"markov_rank": 0, "has_confidence_head": False}
    target, drafter = write_pair(tmp_path, kind, **heads)
    engine = start(target, {"method": method, "model": str(drafter), "num_speculative_tokens": 4})
    outputs = run(engine)
    plain = run(start(target, {"method": "none"}))
    assert collect_tokens(outputs) == collect_tokens(plain)
    assert count(outputs) > 0


def find_types(drafter: object) -> list[dict[str, int]]:
    parts = drafter._parts
    linears = [*parts.backbone.list_linears(), *parts.context.list_linears()]
    return [linear.weight_types for linear in [*linears, parts.backbone.head.table]]


@pytest.mark.skipif(find_kernels() is None, reason="the reference is slow")
def test_a_quantised_drafter_is_held_in_q8_0_and_drafts_nearly_the_same() -> None:
    target = make_target(hidden_size=64, head_dim=16)
    config = make_config(hidden_size=64, draft_vocab_size=64)
    network = make_network(config, target)
    tokens = [7, 3, 200, 51, 9, 9, 120, 4, 30]
    hidden = {}
    for is_quantised in (False, True):
        drafter = make_drafter(network, is_quantised=is_quantised)
        bench = Bench(target, drafter, backend="native")
        bench.compute((0, tokens[:-1], 0))
        hidden[is_quantised], logits = bench.run_drafter([bench.ask(tokens)])
        names = {name for types in find_types(drafter) for name in types}
        assert (names == {"Q8_0"}) == is_quantised
        assert logits.shape == (5, 64)
    assert not torch.equal(hidden[True], hidden[False])
    error = (hidden[True] - hidden[False]).abs().mean()
    assert float(error) < 0.05 * float(hidden[False].abs().mean())


def test_a_head_of_its_own_is_used() -> None:
    target = make_target()
    network = make_network(make_config(), target)
    tensors = list_tensors(network) | {"lm_head.weight": torch.randn(96, 48)}
    options = WeightOptions(torch.float32, torch.device("cpu"))
    parts = build_parts(network.config, tensors, options, is_quantised=False)
    parts.backbone.share_target(target, parts.heads.d2t)
    hidden = torch.randn(3, 48)
    torch.testing.assert_close(
        parts.backbone.compute_logits(hidden), hidden @ tensors["lm_head.weight"].T
    )


def test_the_targets_tables_are_not_copied_for_a_full_vocabulary() -> None:
    target = make_target()
    network = make_network(make_config(draft_vocab_size=257), target)
    drafter = make_drafter(network)
    Bench(target, drafter)
    backbone = drafter._parts.backbone
    assert backbone.head.table is target.head.table
    assert backbone.embed.table is target.embed.table


def test_the_pool_learns_of_the_layers_from_the_configuration_alone(tmp_path: Path) -> None:
    _, drafter = write_pair(tmp_path)
    layers = read_kv_layers(speculate(drafter))
    assert [(layer.num_kv_heads, layer.head_dim) for layer in layers] == [(2, 16)] * 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_speculative_tokens": 6}, r"is 6, .* has 5 drafts; give at most 5"),
        ({"method": "dflash"}, r"holds a dspark drafter, got method 'dflash'"),
        ({"model": "nowhere"}, r"speculative_config 'model': 'nowhere' is neither"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(
    tmp_path: Path, fields: dict[str, object], message: str
) -> None:
    _, drafter = write_pair(tmp_path)
    with pytest.raises(ConfigError, match=message):
        read_kv_layers(speculate(**{"model": drafter, **fields}))


@pytest.mark.parametrize("method", ["dspark", "dflash"])
def test_weights_and_method_go_together(method: str) -> None:
    with pytest.raises(ConfigError, match=r"dspark.*go together"):
        SpeculativeConfig(method=method)


@pytest.mark.usefixtures("byte_tokenizer")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"vocab_size": 90}, "vocabulary size 90; this one has 97"),
        ({"hidden_size": 48}, "hidden size 48; this one has 64"),
        ({"target_layer_ids": (0, 1)}, "taps layer 1; a target of 2 layers allows -1 to 0"),
    ],
)
def test_a_drafter_of_another_target_is_refused(
    tmp_path: Path, overrides: dict[str, object], message: str
) -> None:
    target, drafter = write_pair(tmp_path)
    config: DSparkConfig = make_config(**{**FILE_SIZES, **LAYERS, **overrides})
    other = make_target(vocab_size=config.vocab_size, hidden_size=config.hidden_size)
    save_checkpoint(drafter, make_network(config, other))
    with pytest.raises(ConfigError, match=message):
        start(target, {"method": "dspark", "model": str(drafter)})


def test_layers_that_cannot_be_served_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(make_config(), flavour="gemma4")
    monkeypatch.setattr("forerun.drafters.dspark.load.read_dspark_config", lambda _: config)
    with pytest.raises(ConfigError, match="layers of the gemma4 kind"):
        read_kv_layers(speculate(tmp_path))


def test_a_shorter_context_is_announced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, drafter = write_pair(tmp_path)
    loading = DrafterLoading(
        tokenizer=NoEosTokenizer(),
        vocab_size=97,
        device=torch.device("cpu"),
        dtype=torch.float32,
        quantization="exact",
        max_model_len=1024,
    )
    with caplog.at_level(logging.WARNING):
        build_drafter(speculate(drafter), loading)
    assert "context of 512 tokens is shorter than the target's 1024" in caplog.text


def test_the_verifier_of_the_configuration_decides_how_drafts_are_drawn(tmp_path: Path) -> None:
    target, drafter = write_pair(tmp_path)
    model = load_model(target, dtype=torch.float32)
    loading = DrafterLoading(
        tokenizer=NoEosTokenizer(),
        vocab_size=97,
        device=torch.device("cpu"),
        dtype=torch.float32,
        quantization="exact",
        max_model_len=256,
    )
    for method, is_drawn in (("standard", True), ("coupled", False)):
        config = speculate(drafter, rejection_sample_method=method)
        built = build_drafter(config, loading)
        engine = make_model_engine(model, drafter=built, speculative_config={"method": "ngram"})
        engine.add(new_request("r", [1, 2, 3], max_tokens=8))
        drawn = []
        propose = built.propose
        built.propose = lambda r, p=propose, d=drawn: (d.append(p(r)), d[-1])[1]
        drain(engine)
        assert drawn
        assert all((p.draft_probs[0] is not None) == is_drawn for p in drawn)

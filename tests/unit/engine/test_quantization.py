"""--quantization: what is chosen, what is refused, what is said about it, and that text is greedy.

Without native kernels, so that quantised layers run anywhere.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from fakes import ByteTokenizer, collect_tokens, drain, new_request
from forerun import LLM, kernels
from forerun.commands.flags import Parser, add_engine_flags, build_engine_config
from forerun.config import EngineConfig
from forerun.engine import build, resolve
from forerun.errors import ConfigError
from forerun.models.loader import load_model
from gguf_files import write_random
from model_engines import make_model_engine
from tiny_models import save_hf_model

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
VOCAB_SIZE = 257


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch native kernels off."""
    monkeypatch.setattr(kernels, "_probe", lambda: (None, "switched off"))


def choose(given: str, device: torch.device, stored: str | None) -> str:
    return resolve._resolve_quantization(given, device, stored)


@pytest.mark.parametrize(
    ("given", "device", "stored", "chosen"),
    [
        ("auto", CPU, "Q4_1", "int8"),
        ("auto", CPU, "Q3_K", "int8"),
        ("auto", CPU, "F16", "exact"),
        ("auto", CPU, None, "exact"),
        ("auto", GPU, "Q4_1", "exact"),
        ("exact", CPU, "Q4_1", "exact"),
        ("exact", GPU, "Q4_1", "exact"),
        ("int8", CPU, "Q4_1", "int8"),
        ("q8_0", CPU, "Q4_1", "int8"),
        ("q8_0", CPU, "F16", "int8"),
        ("q8_0", CPU, None, "int8"),
    ],
)
def test_choice(
    given: str,
    device: torch.device,
    stored: str | None,
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "_probe", lambda: (object(), "some kernels"))
    assert choose(given, device, stored) == chosen


@pytest.mark.usefixtures("no_kernels")
def test_without_kernels_int8_must_be_asked_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("forerun"), "propagate", True)
    assert choose("auto", CPU, "Q4_1") == "exact"
    with caplog.at_level("WARNING", logger="forerun"):
        assert choose("int8", CPU, "Q4_1") == "int8"
    assert "computed in PyTorch, slowly: switched off" in caplog.text


@pytest.mark.parametrize(
    ("given", "device", "stored", "message"),
    [
        ("int8", CPU, "F16", "most of this model's are stored as F16. Give q8_0"),
        ("int8", CPU, None, "most of this model's are stored as floats. Give q8_0"),
        ("int8", GPU, "Q4_1", "computes on the CPU, the device is cuda:0; give auto or exact"),
        ("q8_0", GPU, None, "q8_0 computes on the CPU, the device is cuda:0"),
    ],
)
def test_refusals(given: str, device: torch.device, stored: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose(given, device, stored)


def test_unknown_values_are_refused_by_name() -> None:
    message = "quantization must be one of auto, int8, exact, q8_0, got 'int4'"
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_options(quantization="int4")


def test_the_command_line_has_the_flag() -> None:
    parser = Parser(prog="forerun")
    add_engine_flags(parser)
    config = build_engine_config(parser.parse_args(["--quantization", "exact"]))
    assert config.model.quantization == "exact"


@pytest.fixture
def quantised_file(tmp_path: Path) -> Path:
    return write_random(
        tmp_path / "m.gguf",
        kind=Kind.Q4_1,
        kinds={"attn_q": Kind.Q8_0, "ffn_down": Kind.Q5_0},
        vocab_size=VOCAB_SIZE,
    )


def start(model: Path, monkeypatch: pytest.MonkeyPatch, **options: object) -> LLM:
    """Start an engine on a model that brings no tokenizer."""
    monkeypatch.setattr(build, "load_tokenizer", lambda _path: ByteTokenizer())
    return LLM(str(model), kv_cache_memory="1M", max_model_len=64, dtype="float32", **options)


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize(
    ("given", "mode", "types"),
    [
        ("auto", "exact", {"float32"}),
        ("exact", "exact", {"float32"}),
        ("int8", "int8", {"Q4_1", "Q5_0", "Q8_0"}),
        ("q8_0", "int8", {"Q4_1", "Q5_0", "Q8_0"}),
    ],
)
def test_the_mode_and_what_is_held_are_told(
    given: str, mode: str, types: set[str], quantised_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = start(quantised_file, monkeypatch, quantization=given)
    assert llm.info["quantization"] == mode
    assert llm.info["weight_types"].keys() == types
    per_layer = 3 * 64 * 96 + (64 + 32 + 32 + 64) * 64
    assert sum(llm.info["weight_types"].values()) == 2 * per_layer + 2 * VOCAB_SIZE * 64


@pytest.mark.usefixtures("no_kernels")
def test_a_folder_of_floats_is_quantised_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    save_hf_model(tmp_path, "llama", vocab_size=VOCAB_SIZE, **sizes)
    with pytest.raises(ConfigError, match="Give q8_0"):
        start(tmp_path, monkeypatch, quantization="int8")
    llm = start(tmp_path, monkeypatch, quantization="q8_0")
    assert llm.info["quantization"] == "int8"
    assert llm.info["weight_types"].keys() == {"Q8_0"}


@pytest.mark.usefixtures("no_kernels")
def test_greedy_text_is_the_same_with_and_without_speculation(quantised_file: Path) -> None:
    model = load_model(quantised_file, dtype=torch.float32, quantization="int8")
    prompts = [[5, 6, 7, 5, 6], [9] * 12, list(range(40, 60))]
    texts = []
    for method in ("none", "ngram"):
        engine = make_model_engine(model, speculative_config={"method": method})
        for index, prompt in enumerate(prompts):
            engine.add(new_request(f"r{index}", prompt, max_tokens=60, temperature=0.0))
        outputs = drain(engine)
        texts.append(collect_tokens(outputs))
        num_accepted = sum(o.spec_stats.num_accepted_tokens for o in outputs if o.spec_stats)
        assert (num_accepted > 0) == (method == "ngram")
    assert texts[0] == texts[1]
    assert all(len(tokens) == 60 for tokens in texts[0].values())

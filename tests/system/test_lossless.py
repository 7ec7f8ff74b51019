"""Speculation changes speed, never text: greedy and seeded tokens with it on and off.

On the default model tokens are equal except where the two best logits of the plain run are closer
than 1e-3 apart; such places are listed, and comparison stops there. On a small random model the
arms differ in drafter, depth, batch, preemption and prefix hits. Each holds in float32 with the
weights dequantised and with the weights as stored: lossless means against the mode's own target.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from block_drafters import make_config, make_drafter, make_network
from fakes import collect_tokens, continue_greedily, draft_right, drain, new_request
from forerun import LLM, kernels
from forerun.data import build_prompt_set
from forerun.drafters import DRAFTERS
from forerun.drafters.draft_model import DraftModelDrafter
from forerun.drafters.dspark.drafter import DSparkDrafter
from forerun.models.decoder import DecoderModel
from forerun.models.loader import load_model
from gguf_files import write_random
from model_engines import compute_last_logits, make_model, make_model_engine
from scripted_drafters import ScriptedDrafter
from system.losslessness import answer, list_ties

MODES = ("exact", "int8")


def load_prompts(name: str) -> list[list[dict]]:
    return [entry["messages"] for entry in build_prompt_set(name)]


def make_llm(method: str, k: int = 5, **options: object) -> LLM:
    config = {"method": method, "num_speculative_tokens": k}
    return LLM(dtype="float32", speculative_config=config, **options)


@pytest.mark.network
@pytest.mark.parametrize(
    ("path", "quantization"), [("native", "int8"), ("native", "exact"), ("pytorch", "exact")]
)
def test_default_model_greedy_tokens_equal_with_and_without_speculation(
    path: str, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "pytorch":
        monkeypatch.setattr(kernels, "_probe", lambda: (None, "switched off"))
    prompts = load_prompts("small")
    assert len(prompts) == 24
    plain = answer(make_llm("none", quantization=quantization), prompts, 32)
    speculating = make_llm("ngram", 5, quantization=quantization)
    drafted = answer(speculating, prompts, 32)
    print("ties:", list_ties(plain, drafted))
    assert sum(choice.spec_stats.num_accepted_tokens for choice in drafted) > 50
    speculating.engine.check_integrity()


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize(("batch", "num_tokens"), [(1, 16), (32, 32)])
@pytest.mark.parametrize("quantization", ["int8", "exact"])
def test_default_model_on_200_prompts_at_every_depth(
    quantization: str, batch: int, num_tokens: int
) -> None:
    prompts = load_prompts("evaluation")
    assert len(prompts) == 200
    options = {"max_num_seqs": batch, "quantization": quantization}
    plain = answer(make_llm("none", **options), prompts, num_tokens)
    for k in (1, 3, 5, 8):
        drafted = answer(make_llm("ngram", k, **options), prompts, num_tokens)
        accepted = sum(choice.spec_stats.num_accepted_tokens for choice in drafted)
        print(f"batch {batch} k {k}: accepted {accepted}, ties {list_ties(plain, drafted)}")
        assert accepted > 200


@functools.cache
def load_small_model(mode: str) -> DecoderModel:
    """Return a random model in float32, or with Q4_1 weights as stored; no EOS."""
    if mode == "exact":
        return make_model(seed=1)
    with tempfile.TemporaryDirectory() as folder:
        path = write_random(Path(folder) / "m.gguf", "llama", kind=Kind.Q4_1, vocab_size=257)
        model = load_model(path, dtype=torch.float32, quantization="int8")
    model.spec = dataclasses.replace(model.spec, eos_token_ids=())
    return model


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    if request.param == "int8" and kernels.find_kernels() is None:
        pytest.skip(f"the reference is too slow here: {kernels.explain_kernels()}")
    return str(request.param)


@functools.cache
def find_next_token(mode: str, prefix: tuple[int, ...]) -> int:
    return int(compute_last_logits(load_small_model(mode), prefix).argmax())


def build_next_token(mode: str) -> Callable[[Sequence[int]], int]:
    """Return the function that knows the greedy token after any prefix."""
    return lambda prefix: find_next_token(mode, tuple(prefix))


def build_small_drafter() -> DraftModelDrafter:
    """Return another random model of the same vocabulary: mostly wrong."""
    return DraftModelDrafter(make_model(seed=2), max_speculative_tokens=5)


def build_block_drafter(mode: str, method: str = "dspark") -> DSparkDrafter:
    """Return a random block drafter held as the target is."""
    target = load_small_model(mode)
    spec = target.spec
    config = make_config(method, hidden_size=spec.hidden_size, target_layer_ids=(-1, 0))
    return make_drafter(make_network(config, target), is_quantised=mode == "int8")


# Synthetic acceptance is lossy, and says so; drafters with weights have them from elsewhere.
@pytest.mark.parametrize("method", sorted(set(DRAFTERS) - {"synthetic"}))
def test_greedy_tokens_of_every_registered_drafter(method: str, mode: str) -> None:
    prompts = [[1, 2, 3, 1, 2], [7] * 9, list(range(30, 60)), [5]]
    options: dict[str, object] = {"speculative_config": {"method": method}}
    if method == "draft_model":
        options = {"drafter": build_small_drafter(), "speculative_config": {"method": "ngram"}}
    if method in ("dspark", "dflash"):
        drafter = build_block_drafter(mode, method)
        options = {"drafter": drafter, "speculative_config": {"method": "ngram"}}
    engine = make_model_engine(load_small_model(mode), **options)
    for index, prompt in enumerate(prompts):
        engine.add(new_request(f"r{index}", prompt, temperature=0.0, max_tokens=40))
    tokens = collect_tokens(drain(engine))
    for index, prompt in enumerate(prompts):
        assert tokens[f"r{index}", 0] == continue_greedily(build_next_token(mode), prompt, 40)


@pytest.mark.parametrize("num_right", [0, 1, 3, 8])
def test_greedy_tokens_with_drafts_right_until_j(num_right: int, mode: str) -> None:
    next_token, prompt = build_next_token(mode), [3, 1, 4, 1, 5]
    drafter = ScriptedDrafter(draft_right(next_token, num_right))
    engine = make_model_engine(
        load_small_model(mode), drafter=drafter, speculative_config={"num_speculative_tokens": 8}
    )
    engine.add(new_request("r", prompt, temperature=0.0, max_tokens=24))
    outputs = drain(engine)
    assert collect_tokens(outputs)["r", 0] == continue_greedily(next_token, prompt, 24)
    stats = outputs[-1].spec_stats
    assert max(stats.accepted_per_step) == min(num_right, 8)


@functools.cache
def run_baseline(mode: str) -> dict[tuple[str, int], list[int]]:
    return run_seeded(mode, "none", "alone")


def run_seeded(mode: str, drafter: str, load: str) -> dict[tuple[str, int], list[int]]:
    """Return the tokens of seeded requests under one arm."""
    options: dict[str, object] = {"speculative_config": {"method": "none"}}
    if drafter != "none":
        options["speculative_config"] = {"method": "ngram", "prompt_lookup_min": 1}
    if drafter == "right":
        options["drafter"] = ScriptedDrafter(draft_right(build_next_token(mode)))
    if drafter == "draft_model":
        options["drafter"] = build_small_drafter()
    if drafter == "dspark":
        options["drafter"] = build_block_drafter(mode)
    if load == "alone":
        options["max_num_seqs"] = 1
    if load == "preempted":
        options["num_blocks"] = 41
    engine = make_model_engine(load_small_model(mode), **options)
    if load == "prefix_hits":
        for seed in range(8):
            engine.add(new_request(f"warm{seed}", make_prompt(seed), max_tokens=1))
        drain(engine)
    for seed in range(8):
        engine.add(
            new_request(
                f"r{seed}",
                make_prompt(seed),
                seed=seed,
                max_tokens=32,
                n=1 + seed % 3,
                top_p=0.9,
                temperature=0.8,
            )
        )
    if load == "crowd":
        for index in range(24):
            engine.add(new_request(f"other{index}", [index + 1, 9], max_tokens=30))
    outputs = drain(engine)
    if load == "preempted":
        assert engine.scheduler.num_preemptions > 0
    if load == "prefix_hits":
        assert max(output.num_cached_tokens for output in outputs) >= 16
    tokens = collect_tokens(outputs)
    return {key: value for key, value in tokens.items() if key[0].startswith("r")}


def make_prompt(seed: int) -> list[int]:
    return [seed + 1, 2, 3, 4, 2, 3] * 4


@pytest.mark.parametrize("drafter", ["none", "ngram", "right", "draft_model", "dspark"])
@pytest.mark.parametrize("load", ["alone", "together", "crowd", "preempted", "prefix_hits"])
def test_seeded_requests_do_not_depend_on_anything_else(drafter: str, load: str, mode: str) -> None:
    assert run_seeded(mode, drafter, load) == run_baseline(mode)


def test_choices_of_a_seeded_request_differ() -> None:
    engine = make_model_engine(load_small_model("exact"), speculative_config={"method": "ngram"})
    engine.add(new_request("r", [1, 2, 3], seed=5, n=3, max_tokens=16))
    tokens = collect_tokens(drain(engine))
    assert len({tuple(tokens["r", choice]) for choice in range(3)}) == 3


def test_unseeded_requests_differ_from_call_to_call() -> None:
    engine = make_model_engine(load_small_model("exact"), speculative_config={"method": "ngram"})
    for name in ("a", "b"):
        engine.add(new_request(name, [1, 2, 3], max_tokens=16))
    tokens = collect_tokens(drain(engine))
    assert tokens["a", 0] != tokens["b", 0]

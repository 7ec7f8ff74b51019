"""Engines with an int8 KV pool: lossless in their own mode.

With native kernels every sum has a fixed order or is of integers, and a row is quantised by itself:
tokens are the same whatever the batch, drafts, chunks, prefix hits and preemptions. In PyTorch the
batch moves rows by rounding errors, which quantising can turn into half a step: there only the
tokens of a model with clear margins are compared.
"""

from __future__ import annotations

import functools

import pytest
import torch

from fakes import collect_tokens, drain, new_request
from forerun import LLM, SamplingParams
from forerun.data import build_prompt_set
from forerun.kernels import explain_kernels, find_kernels
from model_engines import make_model, make_model_engine

MODEL = make_model(seed=1)
NUM_TOKENS = 24
LOADS = ("together", "chunks", "preempted", "prefix_hits")

needs_kernels = pytest.mark.skipif(find_kernels() is None, reason=explain_kernels())

Tokens = dict[tuple[str, int], list[int]]


def run(load: str, *, method: str = "none", backend: str = "native") -> Tokens:
    """Return the tokens of greedy and seeded requests under one load."""
    options: dict[str, object] = {
        "speculative_config": {"method": method, "prompt_lookup_min": 1},
        "max_num_seqs": 1 if load == "alone" else 8,
    }
    if load == "chunks":
        options["max_num_batched_tokens"] = 11
    if load == "preempted":
        options["num_blocks"] = 41
    engine = make_model_engine(MODEL, kv_dtype=torch.int8, backend=backend, **options)
    if load == "prefix_hits":
        for index in range(8):
            engine.add(new_request(f"warm{index}", make_prompt(index), max_tokens=1))
        drain(engine)
    for index in range(8):
        sampling = {"temperature": 0.0} if index % 2 else {"temperature": 0.9, "seed": index}
        engine.add(new_request(f"r{index}", make_prompt(index), max_tokens=32, **sampling))
    outputs = drain(engine)
    assert (engine.scheduler.num_preemptions > 0) == (load == "preempted")
    if load == "prefix_hits":
        assert max(output.num_cached_tokens for output in outputs) >= 16
    tokens = collect_tokens(outputs)
    return {key: value for key, value in tokens.items() if key[0].startswith("r")}


def make_prompt(index: int) -> list[int]:
    return [index + 1, 2, 3, 4, 2, 3] * 4


@functools.cache
def run_alone() -> Tokens:
    return run("alone")


@needs_kernels
@pytest.mark.parametrize("method", ["none", "ngram"])
@pytest.mark.parametrize("load", LOADS)
def test_tokens_do_not_depend_on_load_drafts_hits_or_preemption(load: str, method: str) -> None:
    assert run(load, method=method) == run_alone()


@needs_kernels
def test_the_kernel_and_the_reference_choose_the_same_greedy_tokens() -> None:
    native, reference = run_alone(), run("alone", backend="torch_ref")
    greedy = [key for key in native if int(key[0][1:]) % 2]
    assert len(greedy) == 4
    assert all(native[key] == reference[key] for key in greedy)


@pytest.mark.parametrize("load", ["together", "preempted", "prefix_hits"])
def test_the_reference_too_serves_every_load(load: str) -> None:
    tokens = run(load, method="ngram", backend="torch_ref")
    assert all(len(ids) == 32 for ids in tokens.values())
    greedy = [key for key in tokens if int(key[0][1:]) % 2]
    alone = run("alone", backend="torch_ref")
    assert all(tokens[key] == alone[key] for key in greedy)


def answer(method: str, batch: int, temperature: float) -> tuple[list[list[int]], LLM]:
    llm = LLM(
        dtype="bfloat16",
        kv_cache_dtype="int8",
        max_num_seqs=batch,
        speculative_config={"method": method},
    )
    params = SamplingParams(temperature=temperature, max_tokens=NUM_TOKENS, seed=5)
    prompts = [entry["messages"] for entry in build_prompt_set("small")[:10]]
    return [c.choices[0].token_ids for c in llm.chat(prompts, params)], llm


@needs_kernels
@pytest.mark.network
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_default_model_answers_the_same_with_drafts_and_without(temperature: float) -> None:
    alone, llm = answer("none", 1, temperature)
    assert llm.info["kv_cache"]["dtype"] == "int8"
    drafted, _ = answer("ngram", 24, temperature)
    assert drafted == alone

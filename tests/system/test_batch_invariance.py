"""The contract of native kernels on the default model's own file: a row's logits are its own.

Logits of 64 requests one at a time, one row per step, are the reference. They must be the same bits
in one batch, as verify rows, as prefill chunks of any size, behind a prefix that another request
computed, and when everything is computed again after a preemption. Text, seeded, must be the same
at any concurrency, with and without drafts.
"""

from __future__ import annotations

import functools
import random

import pytest
import torch

import tiny_models
from forerun import LLM, SamplingParams
from forerun.attention import build_attention_backend
from forerun.data import build_prompt_set
from forerun.data.bundled import fetch_default_model
from forerun.kernels import explain_kernels, find_kernels
from forerun.models.decoder import DecoderModel
from forerun.models.loader import load_model
from tiny_models import PagedRunner, PagedSequence

NUM_REQUESTS, LENGTH, COMPARED_FROM = 64, 40, 24
BLOCK_SIZE = 8

pytestmark = [
    pytest.mark.network,
    pytest.mark.skipif(find_kernels() is None, reason=explain_kernels()),
]


@functools.cache
def load_default_model() -> DecoderModel:
    return load_model(fetch_default_model(), dtype=torch.bfloat16, quantization="int8")


def make_prompts() -> list[list[int]]:
    """Return random tokens; every second request begins like the one before it."""
    numbers = random.Random(3)
    prompts = [[numbers.randrange(100, 40_000) for _ in range(LENGTH)] for _ in range(NUM_REQUESTS)]
    for index in range(1, NUM_REQUESTS, 2):
        prompts[index][: 2 * BLOCK_SIZE] = prompts[index - 1][: 2 * BLOCK_SIZE]
    return prompts


class Recorder:
    """Computes sequences and keeps the logits of the compared positions."""

    def __init__(self) -> None:
        self.runner = PagedRunner(load_default_model(), num_blocks=1200, kv_block_size=BLOCK_SIZE)
        self.logits: dict[tuple[int, int], torch.Tensor] = {}

    def step(self, work: list[tuple[int, PagedSequence, int]]) -> None:
        """Compute the next rows of (request, sequence, number of rows)."""
        starts = [sequence.num_computed for _, sequence, _ in work]
        results, _ = self.runner.step([(sequence, count) for _, sequence, count in work])
        for (index, _, _), start, rows in zip(work, starts, results, strict=True):
            for offset, row in enumerate(rows):
                if start + offset >= COMPARED_FROM:
                    self.logits[index, start + offset] = row.clone()

    def run(self, sequences: dict[int, PagedSequence], sizes: list[list[int]]) -> None:
        """Compute all sequences to their ends together, `sizes[i]` rows of i at a time, in turn."""
        turn = 0
        while left := [i for i, s in sequences.items() if s.num_computed < LENGTH]:
            work = []
            for index in left:
                own = sizes[index % len(sizes)]
                count = min(own[turn % len(own)], LENGTH - sequences[index].num_computed)
                work.append((index, sequences[index], count))
            self.step(work)
            turn += 1


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        tiny_models, "build_attention_backend", lambda _: build_attention_backend("native")
    )


@functools.cache
def compute_alone() -> dict[tuple[int, int], torch.Tensor]:
    recorder = Recorder()
    for index, prompt in enumerate(make_prompts()):
        sequence = recorder.runner.add(prompt)
        recorder.step([(index, sequence, COMPARED_FROM)])
        recorder.run({index: sequence}, [[1]])
    return recorder.logits


def run_arm(name: str) -> Recorder:
    recorder, prompts = Recorder(), make_prompts()
    sequences = {index: recorder.runner.add(prompt) for index, prompt in enumerate(prompts)}
    if name == "decode":
        recorder.run(sequences, [[COMPARED_FROM, *[1] * LENGTH]])
    elif name == "verify":
        recorder.run(sequences, [[COMPARED_FROM - 1, 1 + i, 8 - i] for i in range(8)])
    elif name == "chunks":
        recorder.run(sequences, [[7, 17, 16], [LENGTH], [3, 30, 7]])
    elif name == "prefix hits":
        owners = {i: s for i, s in sequences.items() if i % 2 == 0}
        recorder.run(owners, [[LENGTH]])
        shared = 2 * BLOCK_SIZE
        hits = {
            i: recorder.runner.fork(sequences[i - 1], shared, prompts[i][shared:])
            for i in range(1, NUM_REQUESTS, 2)
        }
        recorder.run(hits, [[5, 1, 8]])
    elif name == "preemption":
        recorder.run(sequences, [[COMPARED_FROM, 1, 4]])
        for sequence in sequences.values():
            sequence.num_computed = 0
        recorder.logits.clear()
        recorder.run(sequences, [[33, 1]])
    return recorder


@pytest.mark.parametrize("name", ["decode", "verify", "chunks", "prefix hits", "preemption"])
def test_logits_are_the_same_bits(name: str) -> None:
    alone, arm = compute_alone(), run_arm(name).logits
    assert arm.keys() == alone.keys()
    assert len(alone) == NUM_REQUESTS * (LENGTH - COMPARED_FROM)
    different = [key for key in alone if not torch.equal(alone[key], arm[key])]
    assert different == []


def answer(concurrency: int, method: str, k: int = 3) -> list[list[int]]:
    """Return seeded answers to 64 prompts."""
    speculation = {
        "method": method,
        "num_speculative_tokens": k,
        "rejection_sample_method": "coupled",
    }
    llm = LLM(max_num_seqs=concurrency, speculative_config=speculation)
    prompts = [entry["messages"] for entry in build_prompt_set("evaluation")][:NUM_REQUESTS]
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=16, seed=11)
    completions = llm.chat(prompts, params)
    return [completion.choices[0].token_ids for completion in completions]


@functools.cache
def answer_alone() -> list[list[int]]:
    return answer(1, "none")


@pytest.mark.parametrize(
    ("concurrency", "method", "k"),
    [(8, "none", 1), (64, "none", 1), (1, "ngram", 3), (8, "ngram", 7), (64, "ngram", 3)],
)
def test_seeded_text_is_the_same_at_any_load(concurrency: int, method: str, k: int) -> None:
    assert answer(concurrency, method, k) == answer_alone()

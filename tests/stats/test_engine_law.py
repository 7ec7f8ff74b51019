"""The sampled law of the whole engine, against the exact law enumerated from the model's logits.

A random 2-layer model over 6 tokens; three output tokens make 216 outcomes. Each case draws
N = 4,000 samples (seeds fixed by numbering requests), pools rare cells, and asks chi-square for
p > 1e-3. Real scheduler, cache, runner and verifiers; positions are drafted again after every
rejection because k is larger than what usually survives.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from scipy import stats

from block_drafters import make_config, make_drafter, make_network
from budgets import make_profile
from fakes import collect_tokens, new_request
from forerun.drafters.draft_model import DraftModelDrafter
from forerun.engine import engine as engine_module
from model_engines import compute_last_logits, make_model, make_model_engine
from scripted_drafters import RandomDrafter, ScriptedDrafter

VOCAB = 6
NUM_SAMPLES = 4_000
LENGTH = 3
PROMPT = [0, 1, 2, 1, 2]
MODEL = make_model(vocab_size=VOCAB, seed=3)
DRAFT_MODEL = make_model(vocab_size=VOCAB, seed=5)
# Some of the target's tokens are never drafted.
BLOCK_DRAFTER = make_network(
    make_config(
        vocab_size=VOCAB, draft_vocab_size=VOCAB - 2, block_size=2, target_layer_ids=(-1, 0)
    ),
    MODEL,
)

CHEAP_ROWS = make_profile([1, 64, 256], [1.0, 1.1, 1.5])

CASES = {
    "plain": {},
    "hot": {"temperature": 1.7},
    "top_p": {"top_p": 0.7},
    "top_k_min_p": {"top_k": 4, "min_p": 0.12, "temperature": 0.8},
    "penalties": {
        "repetition_penalty": 1.4,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
        "logit_bias": ((3, 0.9),),
    },
    "min_tokens": {"min_tokens": 2, "stop_token_ids": (1,)},
}


def process(logits: np.ndarray, output: Sequence[int], params: dict) -> np.ndarray:
    """Return the law after `output`, written independently of the engine, in float64."""
    logits = logits.astype(np.float64).copy()
    for token, bias in params.get("logit_bias", ()):
        logits[token] += bias
    repetition = params.get("repetition_penalty", 1.0)
    for token in set(PROMPT) | set(output):
        logits[token] = (
            logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
        )
    for token, count in Counter(output).items():
        logits[token] -= params.get("presence_penalty", 0.0)
        logits[token] -= params.get("frequency_penalty", 0.0) * count
    if len(output) < params.get("min_tokens", 0):
        logits[list(params["stop_token_ids"])] = -np.inf
    logits /= params.get("temperature", 1.0)
    law = np.exp(logits - logits.max())
    order = np.argsort(-law, kind="stable")
    if params.get("top_k", 0):
        law[order[params["top_k"] :]] = 0
    law /= law.sum()
    before = np.cumsum(law[order]) - law[order]
    law[order[before >= params.get("top_p", 1.0)]] = 0
    law /= law.sum()
    law[law < params.get("min_p", 0.0) * law.max()] = 0
    return law / law.sum()


def enumerate_law(params: dict) -> dict[tuple[int, ...], float]:
    """Return the probability of every output, stops included."""
    laws: dict[tuple[int, ...], float] = {}

    def visit(output: tuple[int, ...], mass: float) -> None:
        stopped = bool(output) and output[-1] in params.get("stop_token_ids", ())
        if len(output) == LENGTH or (stopped and len(output) >= params.get("min_tokens", 0)):
            laws[output] = mass
            return
        law = process(compute_last_logits(MODEL, [*PROMPT, *output]).numpy(), output, params)
        for token in np.nonzero(law)[0]:
            visit((*output, int(token)), mass * law[token])

    visit((), 1.0)
    return laws


def draft_law(prefix: Sequence[int]) -> torch.Tensor:
    """A drafter's opinion: related to the target's, but wrong everywhere."""
    return compute_draft_law(tuple(prefix))


@functools.cache
def compute_draft_law(prefix: tuple[int, ...]) -> torch.Tensor:
    logits = compute_last_logits(MODEL, prefix) * 0.6
    logits[len(prefix) % VOCAB] += 1.0
    return torch.softmax(logits, -1)


def draft_cycle(prefix: Sequence[int], depth: int) -> list[int]:
    return [(prefix[-1] + step) % VOCAB for step in range(1, depth + 1)]


DRAFTERS: dict[str, Callable[[], object] | None] = {
    "none": None,
    "ngram": None,
    "scripted": lambda: ScriptedDrafter(draft_cycle),
    "random": lambda: RandomDrafter(draft_law, depth=2),
    "draft_model": lambda: DraftModelDrafter(DRAFT_MODEL, max_speculative_tokens=2),
    "dspark": lambda: make_drafter(BLOCK_DRAFTER),
}


def sample(
    drafter: str,
    params: dict,
    method: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    looks_up: bool = False,
) -> Counter:
    """Return the counts of outputs over NUM_SAMPLES unseeded requests with known seeds.

    With `looks_up` drafts are copied from the request's own text where that seems better.
    """
    seeds = itertools.count()
    monkeypatch.setattr(engine_module.secrets, "randbits", lambda _: next(seeds))
    make = DRAFTERS[drafter]
    config = {
        "method": "none" if drafter == "none" else "ngram",
        "num_speculative_tokens": 2,
        "prompt_lookup_min": 1,
        "rejection_sample_method": method,
    }
    if looks_up:
        config |= {"method": "draft_model", "model": "given", "prompt_lookup": True}
        config |= {"enable_adaptive_verification": True}
    engine = make_model_engine(
        MODEL,
        drafter=make() if make else None,
        max_num_seqs=64,
        max_waiting_requests=NUM_SAMPLES,
        speculative_config=config,
        profile=CHEAP_ROWS if looks_up else None,
    )
    for index in range(NUM_SAMPLES):
        engine.add(new_request(f"r{index}", PROMPT, max_tokens=LENGTH, **params))
    outputs = []
    while engine.has_work:
        outputs += engine.step().outputs
    engine.check_integrity()
    return Counter(tuple(tokens) for tokens in collect_tokens(outputs).values())


def compute_p_value(counts: Counter, law: dict[tuple[int, ...], float]) -> float:
    """Return the chi-square p-value, cells expected under 8 times pooled into one."""
    assert set(counts) <= set(law), f"impossible outputs: {set(counts) - set(law)}"
    expected = np.array([mass * counts.total() for mass in law.values()])
    observed = np.array([counts[output] for output in law], dtype=float)
    rare = expected < 8
    if rare.any():
        expected = np.append(expected[~rare], expected[rare].sum())
        observed = np.append(observed[~rare], observed[rare].sum())
    return float(stats.chisquare(observed, expected).pvalue)


@pytest.mark.parametrize("method", ["standard", "coupled"])
@pytest.mark.parametrize(
    ("drafter", "case"),
    [
        *(("random", case) for case in CASES),
        *itertools.product(("scripted", "draft_model", "dspark"), ("top_p", "penalties")),
    ],
)
def test_output_law_is_the_targets(
    drafter: str, case: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = sample(drafter, CASES[case], method, monkeypatch)
    assert compute_p_value(counts, enumerate_law(CASES[case])) > 1e-3


@pytest.mark.parametrize("method", ["standard", "coupled"])
@pytest.mark.parametrize("drafter", ["none", "ngram", "draft_model", "dspark"])
def test_output_law_with_shipped_drafters(
    drafter: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = sample(drafter, CASES["plain"], method, monkeypatch)
    assert compute_p_value(counts, enumerate_law(CASES["plain"])) > 1e-3


@pytest.mark.parametrize("method", ["standard", "coupled"])
@pytest.mark.parametrize("drafter", ["random", "dspark"])
def test_output_law_with_lookups_before_the_drafter(
    drafter: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = sample(drafter, CASES["plain"], method, monkeypatch, looks_up=True)
    assert compute_p_value(counts, enumerate_law(CASES["plain"])) > 1e-3


def test_the_test_sees_a_wrong_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Power: samples at temperature 1 against the law at 1.3 must be rejected."""
    counts = sample("random", CASES["plain"], "standard", monkeypatch)
    assert compute_p_value(counts, enumerate_law({"temperature": 1.3})) < 1e-6

"""A target small enough to enumerate: 5 tokens, logits from the previous token, exact laws.

`generate` runs the real Verifier over many numbered requests in lockstep; `enumerate_law` computes
the law of the same output in float64, processors and filters written out by hand.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy import stats

from forerun.core import SamplingParams
from forerun.sampling.noise import Stream, derive_keys, uniform
from forerun.verification.verify import Verifier
from unit.sampling.scheduled import make_scheduled

VOCAB = 5
PROMPT = [0, 3]
TABLE = np.array(
    [
        [1.0, 0.2, -0.5, 0.8, -1.0],
        [0.1, 1.4, 0.3, -0.7, 0.5],
        [-0.3, 0.6, 0.9, 0.2, 1.1],
        [0.7, -0.2, 1.3, 0.1, 0.4],
        [1.2, 0.9, -0.4, 0.6, -0.1],
    ]
)
# What the probabilistic drafter draws from; the last row is certain of one token.
DRAFT_TABLE = np.array(
    [
        [0.4, 0.1, 0.2, 0.2, 0.1],
        [0.1, 0.1, 0.3, 0.3, 0.2],
        [0.2, 0.2, 0.2, 0.2, 0.2],
        [0.5, 0.3, 0.0, 0.1, 0.1],
        [0.0, 1.0, 0.0, 0.0, 0.0],
    ]
)


@dataclass(slots=True)
class Row:
    """One request being generated; `num_draws` counts its steps."""

    number: int
    token_ids: list[int] = field(default_factory=lambda: list(PROMPT))
    num_draws: int = 0
    choice_index: int = 0


Proposal = tuple[list[int], np.ndarray | None]
Draft = Callable[[Sequence[Row], int], list[Proposal]]


def draft_nothing(rows: Sequence[Row], num_drafts: int) -> list[Proposal]:
    del num_drafts
    return [([], None)] * len(rows)


def draft_successors(rows: Sequence[Row], num_drafts: int) -> list[Proposal]:
    """Draft deterministically: each token plus two, wrapping around."""
    steps = range(2, 2 * num_drafts + 1, 2)
    return [([(row.token_ids[-1] + step) % VOCAB for step in steps], None) for row in rows]


def draft_by_table(rows: Sequence[Row], num_drafts: int) -> list[Proposal]:
    """Draw from DRAFT_TABLE with the drafter's own stream and return the very q drawn from."""
    fields = np.array([(row.number, row.choice_index, row.num_draws) for row in rows]).T
    keys = [derive_keys(Stream.DRAFT, *fields, place) for place in range(num_drafts)]
    last = np.array([row.token_ids[-1] for row in rows])
    tokens, probs = [], []
    for noise in map(uniform, keys):
        probs.append(DRAFT_TABLE[last])
        last = (probs[-1].cumsum(axis=1) <= noise[:, None]).sum(axis=1)
        tokens.append(last)
    drafts = np.stack(tokens, axis=1).tolist()
    return list(zip(drafts, np.stack(probs, axis=1), strict=True))


DRAFTS: dict[str, Draft] = {
    "none": draft_nothing,
    "deterministic": draft_successors,
    "probabilistic": draft_by_table,
}


def verify_rows(
    verifier: Verifier,
    rows: Sequence[Row],
    params: SamplingParams,
    proposals: Sequence[Proposal],
) -> None:
    """Verify one step of all rows and commit what comes out."""
    requests = [
        make_scheduled(
            f"{row.number}-{row.choice_index}",
            token_ids=row.token_ids,
            num_prompt_tokens=len(PROMPT),
            drafts=drafts,
            params=params,
            seed=row.number,
            choice_index=row.choice_index,
            num_draws=row.num_draws,
            banned=(4,),
        )
        for row, (drafts, _) in zip(rows, proposals, strict=True)
    ]
    previous = [
        token
        for row, (drafts, _) in zip(rows, proposals, strict=True)
        for token in (row.token_ids[-1], *drafts)
    ]
    probs = [
        None if given is None else torch.tensor(given, dtype=torch.float32)
        for _, given in proposals
    ]
    logits = torch.tensor(TABLE[previous], dtype=torch.float32)
    for row, result in zip(rows, verifier.verify(logits, requests, probs), strict=True):
        assert result.error is None
        row.token_ids += result.token_ids
        row.num_draws += 1


def generate(
    method: str,
    rows: Sequence[Row],
    length: int,
    params: SamplingParams,
    draft: Draft = draft_nothing,
    num_drafts: int = 0,
) -> np.ndarray:
    """Return `length` output tokens of every row, [num_rows, length]."""
    verifier = Verifier(method)
    running = list(rows)
    while running:
        verify_rows(verifier, running, params, draft(running, num_drafts))
        running = [row for row in running if len(row.token_ids) < len(PROMPT) + length]
    return np.array([row.token_ids[len(PROMPT) : len(PROMPT) + length] for row in rows])


def compute_law(output: Sequence[int], params: SamplingParams) -> np.ndarray:
    """Return the law of the token after PROMPT + output, in float64."""
    tokens = [*PROMPT, *output]
    logits = TABLE[tokens[-1]].copy()
    for token in set(tokens):
        scale = params.repetition_penalty
        logits[token] = logits[token] / scale if logits[token] > 0 else logits[token] * scale
    for token, count in Counter(output).items():
        logits[token] -= params.frequency_penalty * count + params.presence_penalty
    if len(output) < params.min_tokens:
        logits[4] = -np.inf
    probs = np.exp((logits - logits.max()) / params.temperature)
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    order = order[: params.top_k] if params.top_k > 0 else order
    mass = probs[order] / probs[order].sum()
    keep = (mass.cumsum() - mass < params.top_p) & (probs[order] >= params.min_p * probs.max())
    law = np.zeros(VOCAB)
    law[order[keep]] = probs[order[keep]]
    return law / law.sum()


def enumerate_law(length: int, params: SamplingParams) -> np.ndarray:
    """Return the probability of every output of this length, flat, first token slowest."""
    law = []
    for output in itertools.product(range(VOCAB), repeat=length):
        steps = [compute_law(output[:i], params)[token] for i, token in enumerate(output)]
        law.append(np.prod(steps))
    return np.array(law)


def compute_p_value(outputs: np.ndarray, params: SamplingParams) -> float:
    """Chi-square of the outputs [num_samples, length] against the exact law.

    An outcome of probability 0 must not occur at all; cells expected under 5 times are pooled.
    """
    length = outputs.shape[1]
    codes = outputs @ (VOCAB ** np.arange(length - 1, -1, -1))
    counts = np.bincount(codes, minlength=VOCAB**length)
    expected = enumerate_law(length, params) * len(outputs)
    if counts[expected == 0].any():
        return 0.0
    is_rare = expected < 5
    counts = np.append(counts[~is_rare], counts[is_rare].sum())
    expected = np.append(expected[~is_rare], expected[is_rare].sum())
    if expected[-1] == 0:
        counts, expected = counts[:-1], expected[:-1]
    return float(stats.chisquare(counts, expected).pvalue)

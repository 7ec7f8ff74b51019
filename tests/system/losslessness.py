"""Greedy answers of two arms, equal but for ties of their two best logits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from forerun import LLM, SamplingParams
from forerun.core import TokenLogprobs

TIE_MARGIN = 1e-3


def answer(llm: LLM, prompts: Sequence[list[dict]], max_tokens: int) -> list:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=2)
    return [completion.choices[0] for completion in llm.chat(prompts, params)]


def compute_margin(entry: TokenLogprobs) -> float:
    return entry.top[0][1] - entry.top[1][1]


def list_ties(plain: Sequence, other: Sequence) -> list[tuple[int, int, float]]:
    """Return (prompt, position, margin) of each divergence; fail unless each is a tie."""
    ties = []
    for index, (a, b) in enumerate(zip(plain, other, strict=True)):
        if a.token_ids == b.token_ids:
            continue
        pairs = itertools.zip_longest(a.token_ids, b.token_ids)
        at = next(i for i, (x, y) in enumerate(pairs) if x != y)
        margin = compute_margin(a.logprobs[at])
        assert margin < TIE_MARGIN, f"prompt {index} diverges at {at}, margin {margin:.4f}"
        ties.append((index, at, margin))
    return ties

"""Greedy answers to code prompts: how many differ from another mode's, and from where on."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from forerun import LLM, SamplingParams

TokenIds = list[int]


def generate(llm: LLM, conversations: Sequence[Any], max_tokens: int) -> list[TokenIds]:
    """Return the token ids of every answer, all asked at once."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return [answer.choices[0].token_ids for answer in llm.chat(conversations, params)]


def find_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first place where two outputs differ (one may just end); None if nowhere."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def compare_outputs(ours: Sequence[TokenIds], others: Sequence[TokenIds]) -> dict[str, Any]:
    """Return how many outputs differ and the mean place of the first difference of those."""
    places = [find_difference(a, b) for a, b in zip(ours, others, strict=True)]
    found = [place for place in places if place is not None]
    return {
        "num_outputs": len(places),
        "num_different": len(found),
        "different_share": len(found) / len(places),
        "first_difference_mean": statistics.fmean(found) if found else None,
    }

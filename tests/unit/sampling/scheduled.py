"""Builds the ScheduledRequest of a decoding request, as a scheduler would hand it over."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.core import SamplingParams
from forerun.plan import ScheduledRequest


def make_scheduled(
    request_id: str = "r",
    *,
    token_ids: Sequence[int] = (0,),
    num_prompt_tokens: int = 1,
    drafts: Sequence[int] = (),
    params: SamplingParams | None = None,
    seed: int = 0,
    choice_index: int = 0,
    num_draws: int = 0,
    generation: int = 0,
    banned: Sequence[int] = (),
) -> ScheduledRequest:
    """Return a request whose last committed token is its anchor."""
    return ScheduledRequest(
        request_id=request_id,
        generation=generation,
        token_ids=token_ids,
        num_prompt_tokens=num_prompt_tokens,
        num_computed_tokens=len(token_ids) - 1,
        num_new_tokens=1,
        draft_token_ids=drafts,
        block_table=(),
        params=params if params is not None else SamplingParams(),
        seed=seed,
        choice_index=choice_index,
        num_draws=num_draws,
        banned_token_ids=frozenset(banned),
    )

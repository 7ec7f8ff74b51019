"""The synthetic steps of a cost profile: which sizes, in which shape, on which blocks.

Requests get blocks of their own as far as the pool reaches, so that reading K/V costs what it will;
block 0 is the null block and stays out. Their tokens are fixed and repeat, so that prompt lookup
finds matches. Symbols: N requests, R rows, C cached tokens of each request, k draft tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.core import SamplingParams
from forerun.plan import DraftRequest, ScheduledRequest

SHORT_CONTEXT = 128
LONG_CONTEXT = 1024
GREEDY = SamplingParams(temperature=0.0, max_tokens=None)
_PERIOD = 48
# Tokens that a drafting request may grow by while it is timed.
_GROWTH = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileLimits:
    """What the engine can run; `max_draft_tokens` is k, 0 without a drafter."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    max_draft_tokens: int
    num_kv_blocks: int
    kv_block_size: int
    vocab_size: int

    @property
    def short_context(self) -> int:
        """Cached tokens per request of most measurements."""
        return min(SHORT_CONTEXT, self.max_model_len // 4)

    @property
    def rows_each(self) -> int:
        """Rows of a request that verifies as many drafts as it can."""
        return max(1, min(1 + self.max_draft_tokens, self.max_model_len - 1))

    @property
    def max_rows(self) -> int:
        """Rows of the largest step there can be."""
        return min(self.max_num_batched_tokens, self.max_num_seqs * (self.max_model_len - 1))


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows of each request of a step, and the cached tokens every one of them reads."""

    rows: tuple[int, ...]
    context: int

    @property
    def num_context_tokens(self) -> int:
        """Cached tokens of the step, each request's once."""
        return len(self.rows) * self.context


def list_row_counts(limit: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 8, 12, 16, 24 ... and the limit itself."""
    powers = itertools.takewhile(lambda size: size <= limit, (2**i for i in itertools.count()))
    sizes = {size for power in powers for size in (power, power * 3 // 2)}
    return sorted({size for size in sizes if size <= limit} | {limit})


def shape_step(num_rows: int, limits: ProfileLimits) -> Shape:
    """Return a step of 1 + k rows by as few requests as possible, or longer ones if need be."""
    whole, rest = divmod(num_rows, limits.rows_each)
    rows = (limits.rows_each,) * whole + ((rest,) if rest else ())
    if len(rows) > limits.max_num_seqs:
        each, num_longer = divmod(num_rows, limits.max_num_seqs)
        rows = (each + 1,) * num_longer + (each,) * (limits.max_num_seqs - num_longer)
    return Shape(rows, min(limits.short_context, limits.max_model_len - max(rows)))


def build_requests(
    shape: Shape, limits: ProfileLimits, params: SamplingParams
) -> list[ScheduledRequest]:
    """Return requests with one committed token to compute and drafts after it."""
    tables = _build_tables([shape.context + rows for rows in shape.rows], limits)
    return [
        ScheduledRequest(
            request_id=f"profile-{index}",
            generation=0,
            token_ids=_make_tokens(index, shape.context + 1, limits.vocab_size),
            num_prompt_tokens=shape.context + 1,
            num_computed_tokens=shape.context,
            num_new_tokens=1,
            draft_token_ids=_make_tokens(index + 1, rows - 1, limits.vocab_size),
            block_table=table,
            params=params,
            seed=index,
            choice_index=0,
            num_draws=0,
        )
        for index, (rows, table) in enumerate(zip(shape.rows, tables, strict=True))
    ]


def build_draft_requests(
    num_requests: int, depth: int, limits: ProfileLimits
) -> list[DraftRequest]:
    """Return requests whose last token alone the drafter has not computed."""
    # The anchor, its drafts, and as much again for drafters that write what they draft.
    ahead = 2 * limits.max_draft_tokens + _GROWTH
    num_tokens = max(2, min(limits.short_context + 1, limits.max_model_len - ahead))
    tables = _build_tables([num_tokens + ahead] * num_requests, limits)
    return [
        DraftRequest(
            request_id=f"profile-{index}",
            generation=0,
            token_ids=_make_tokens(index, num_tokens, limits.vocab_size),
            depth=depth,
            block_table=table,
            params=GREEDY,
            seed=index,
            choice_index=0,
            num_draws=0,
            num_drafter_computed_tokens=num_tokens - 1,
        )
        for index, table in enumerate(tables)
    ]


def _build_tables(lengths: Sequence[int], limits: ProfileLimits) -> list[list[int]]:
    """Give each request blocks of its own, in turn, from the start again where the pool ends."""
    blocks = itertools.cycle(range(1, limits.num_kv_blocks + 1))
    counts = (-(-length // limits.kv_block_size) for length in lengths)
    return [list(itertools.islice(blocks, count)) for count in counts]


def grow(request: DraftRequest) -> None:
    """Commit one more token, the next of its period, as a step does."""
    assert isinstance(request.token_ids, list)
    request.token_ids.append(request.token_ids[-_find_period(len(request.token_ids))])
    request.num_drafter_computed_tokens += 1


def _make_tokens(seed: int, count: int, vocab_size: int) -> list[int]:
    """Return fixed pseudo-random token ids that repeat with a period."""
    numbers = np.random.default_rng(seed).integers(vocab_size, size=_find_period(count))
    return list(itertools.islice(itertools.cycle(numbers.tolist()), count))


def _find_period(num_tokens: int) -> int:
    return max(1, min(_PERIOD, num_tokens // 2))


def cut_sizes(sizes: Sequence[int], most: int) -> list[int]:
    """Return the sizes up to a limit, and the limit in place of the first one beyond it."""
    fitting = [size for size in sizes if size < most]
    return fitting if len(fitting) == len(sizes) else [*fitting, most]


def list_powers(limit: int) -> list[int]:
    """Return 1, 2, 4 ... and the limit itself."""
    powers = itertools.takewhile(lambda size: size < limit, (2**i for i in itertools.count()))
    return [*powers, limit]

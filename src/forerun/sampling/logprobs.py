"""Logprobs of the raw distribution (before any processor), for output and prompt rows alike.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.core import TokenLogprobs

_CHUNK_ROWS = 64


def compute_logprobs(
    logits: Tensor, rows: Sequence[int], token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Return, per entry, the logprob and rank of `token_ids[i]` in row `rows[i]` of raw logits.

    logprob = logit - logsumexp; rank = 1 + the number of strictly greater logits; `top` holds the
    `num_top[i]` most likely tokens. Works through the rows in chunks, so that nothing as large as
    the logits is allocated.
    """
    results: list[TokenLogprobs] = []
    for start in range(0, len(rows), _CHUNK_ROWS):
        chunk = slice(start, start + _CHUNK_ROWS)
        chosen = torch.tensor(rows[chunk], dtype=torch.int64, device=logits.device)
        results += _compute_chunk(logits[chosen], token_ids[chunk], num_top[chunk])
    return results


def _compute_chunk(
    logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    columns = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)[:, None]
    chosen = logits.gather(1, columns)
    norm = logits.logsumexp(dim=-1, keepdim=True)
    ranks = ((logits > chosen).sum(dim=-1) + 1).tolist()
    logprobs = (chosen - norm).squeeze(1).tolist()
    tops = _find_top(logits, norm, max(num_top))
    return [
        TokenLogprobs(token_id=token, logprob=logprob, rank=rank, top=top[:count])
        for token, logprob, rank, top, count in zip(
            token_ids, logprobs, ranks, tops, num_top, strict=True
        )
    ]


def _find_top(logits: Tensor, norm: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """Return the most likely (token id, logprob) pairs of each row, ties by token id."""
    values, token_ids = logits.topk(min(count, logits.shape[1]), dim=-1)
    pairs = zip(token_ids.tolist(), (values - norm).tolist(), strict=True)
    return [
        sorted(zip(row_ids, row_values, strict=True), key=lambda pair: (-pair[1], pair[0]))
        for row_ids, row_values in pairs
    ]

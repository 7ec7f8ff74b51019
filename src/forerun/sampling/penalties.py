"""Logits processors: logit_bias, penalties, min_tokens, on every row of a verify pass.

Row j of a request sees its committed tokens plus the drafts before j. Order, as in vLLM and
Hugging Face: bias; repetition (tokens of prompt or output: l / r if l > 0 else l * r); frequency
(l -= f * count in the output); presence (l -= p if in the output); then -inf for banned ids in
rows whose output is still shorter than min_tokens. Only the tokens concerned are touched.
Shapes: R rows, V vocabulary, U distinct tokens a request has seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.core import SamplingParams
from forerun.plan import ScheduledRequest


def needs_processing(request: ScheduledRequest) -> bool:
    """Whether any row of this request differs from the raw logits."""
    return (
        bool(request.params.logit_bias)
        or request.params.has_penalties
        or _count_banned_rows(request) > 0
    )


class LogitsProcessors:
    """Applies processors in place, remembering per request which tokens it has seen.

    The memory is keyed by (request_id, generation), follows the committed tokens incrementally and
    is dropped by `release`.
    """

    def __init__(self) -> None:
        self._histories: dict[str, _TokenHistory] = {}

    def apply_(
        self, logits: Tensor, requests: Sequence[ScheduledRequest], row_starts: Sequence[int]
    ) -> None:
        """Process the rows of these requests; request i owns 1 + its drafts from row_starts[i]."""
        pairs = list(zip(requests, row_starts, strict=True))
        _apply_bias_(logits, [pair for pair in pairs if pair[0].params.logit_bias])
        penalised = [pair for pair in pairs if pair[0].params.has_penalties]
        if penalised:
            entries = [self._collect_entries(request, start) for request, start in penalised]
            _apply_penalties_(logits, entries)
        _apply_bans_(logits, [pair for pair in pairs if _count_banned_rows(pair[0])])

    def release(self, request_ids: Iterable[str]) -> None:
        """Forget these requests; unknown ids are ignored."""
        for request_id in request_ids:
            self._histories.pop(request_id, None)

    def _collect_entries(self, request: ScheduledRequest, row_start: int) -> _Entries:
        history = self._histories.get(request.request_id)
        if history is None or history.generation != request.generation:
            history = _TokenHistory(request.generation)
            self._histories[request.request_id] = history
        history.extend(request)
        return history.build_entries(request, row_start)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entries:
    """The (row, token) cells one request's penalties may change."""

    rows: np.ndarray  # [(1 + num_drafts) * U] int64
    token_ids: np.ndarray  # same
    counts: np.ndarray  # same, float32: occurrences in the output
    is_seen: np.ndarray  # same, bool: in the prompt or the output
    params: SamplingParams


class _TokenHistory:
    """Distinct tokens of one request and how often each is in the output.

    Slot s of the arrays belongs to the s-th distinct token; arrays grow by doubling.
    """

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self._slots: dict[int, int] = {}
        self._token_ids = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)
        self._num_tokens = 0

    def extend(self, request: ScheduledRequest) -> None:
        """Take in the tokens committed since the last call."""
        first = self._num_tokens
        if request.params.repetition_penalty == 1.0:
            first = max(first, request.num_prompt_tokens)  # prompt tokens would change nothing
        for place in range(first, len(request.token_ids)):
            slot = self._find_slot(request.token_ids[place])
            if place >= request.num_prompt_tokens:
                self._counts[slot] += 1
        self._num_tokens = len(request.token_ids)

    def build_entries(self, request: ScheduledRequest, row_start: int) -> _Entries:
        """Lay out seen tokens and counts for every row, drafts before the row included."""
        drafts = request.draft_token_ids
        num_seen, num_rows = len(self._slots), 1 + len(drafts)
        unseen = [token for token in dict.fromkeys(drafts) if token not in self._slots]
        columns = {token: num_seen + i for i, token in enumerate(unseen)}
        counts = np.zeros((num_rows, num_seen + len(unseen)), dtype=np.float32)
        counts[:, :num_seen] = self._counts[:num_seen]
        for row, token in enumerate(drafts):
            column = columns[token] if token in columns else self._slots[token]
            counts[row + 1 :, column] += 1
        is_seen = counts > 0
        is_seen[:, :num_seen] = True
        token_ids = np.concatenate([self._token_ids[:num_seen], np.array(unseen, dtype=np.int64)])
        return _Entries(
            rows=np.repeat(np.arange(row_start, row_start + num_rows), len(token_ids)),
            token_ids=np.tile(token_ids, num_rows),
            counts=counts.ravel(),
            is_seen=is_seen.ravel(),
            params=request.params,
        )

    def _find_slot(self, token_id: int) -> int:
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._token_ids):
            self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._token_ids[slot] = token_id
        return slot


def _apply_penalties_(logits: Tensor, entries: Sequence[_Entries]) -> None:
    """Gather the cells of all requests, penalise, and put them back. No cell occurs twice."""

    def join(arrays: Iterable[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(list(arrays))).to(logits.device)

    def spread(name: str) -> Tensor:
        values = [np.full(len(e.rows), getattr(e.params, name), dtype=np.float32) for e in entries]
        return join(values)

    cells = (join(e.rows for e in entries), join(e.token_ids for e in entries))
    counts = join(e.counts for e in entries)
    values = logits[cells]
    repetition = torch.where(join(e.is_seen for e in entries), spread("repetition_penalty"), 1.0)
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= spread("frequency_penalty") * counts
    values -= spread("presence_penalty") * (counts > 0)
    logits[cells] = values


def _apply_bias_(logits: Tensor, pairs: Sequence[tuple[ScheduledRequest, int]]) -> None:
    rows: list[int] = []
    token_ids: list[int] = []
    biases: list[float] = []
    for request, start in pairs:
        for row in range(start, start + 1 + len(request.draft_token_ids)):
            rows += [row] * len(request.params.logit_bias)
            token_ids += [token for token, _ in request.params.logit_bias]
            biases += [bias for _, bias in request.params.logit_bias]
    if rows:
        cells = _to_cells(rows, token_ids, logits.device)
        values = torch.tensor(biases, dtype=logits.dtype, device=logits.device)
        logits.index_put_(cells, values, accumulate=True)


def _apply_bans_(logits: Tensor, pairs: Sequence[tuple[ScheduledRequest, int]]) -> None:
    rows: list[int] = []
    token_ids: list[int] = []
    for request, start in pairs:
        banned = sorted(request.banned_token_ids)
        for row in range(start, start + _count_banned_rows(request)):
            rows += [row] * len(banned)
            token_ids += banned
    if rows:
        logits[_to_cells(rows, token_ids, logits.device)] = -torch.inf


def _count_banned_rows(request: ScheduledRequest) -> int:
    """Return how many leading rows still lie before min_tokens (row j: output + j tokens)."""
    if not request.banned_token_ids:
        return 0
    num_output = len(request.token_ids) - request.num_prompt_tokens
    missing = request.params.min_tokens - num_output
    return max(0, min(missing, 1 + len(request.draft_token_ids)))


def _to_cells(
    rows: Sequence[int], token_ids: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor]:
    pairs = torch.tensor([rows, token_ids], dtype=torch.int64, device=device)
    return pairs[0], pairs[1]

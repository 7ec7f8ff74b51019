"""ModelRunner: the torch implementation of the Runner seam.

One target forward over all rows of a plan, verification of the rows that need logits, then
drafting. Keeps no scheduling state; what it caches per request is the distribution its drafts were
drawn from. Logits are computed for few requests at a time so that they never exceed a fixed size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from forerun.attention.base import AttentionBackend, AttentionContext
from forerun.cache.kv_store import KVStore
from forerun.core import TokenLogprobs
from forerun.drafters.base import Drafter, DrafterCache
from forerun.engine.batch import StepBatch, build_batch, select_logits_rows
from forerun.errors import ConfigError
from forerun.hidden_states import ComputedRows, HiddenStateSink
from forerun.models.base import ModelOutput, TargetModel
from forerun.plan import (
    DraftRequest,
    RequestDraft,
    RequestResult,
    ScheduledRequest,
    StepPlan,
    StepResult,
)
from forerun.sampling.logprobs import compute_logprobs
from forerun.verification.verify import Verifier

MAX_LOGITS_BYTES = 256 * 2**20

T = TypeVar("T")


class ModelRunner:
    """Runs target, verifier and drafter on one device. Single-threaded."""

    def __init__(
        self,
        *,
        model: TargetModel,
        drafter: Drafter,
        verifier: Verifier,
        kv_store: KVStore,
        backend: AttentionBackend,
        device: torch.device,
        sink: HiddenStateSink | None = None,
    ) -> None:
        self._model = model
        self._drafter = drafter
        self._verifier = verifier
        self._kv_store = kv_store
        self._backend = backend
        self._device = device
        self._sink = sink
        self._target_layer_ids = _choose_taps(drafter, sink)
        self._max_logits_rows = count_logits_rows(model.spec.vocab_size)
        self._draft_probs: dict[str, tuple[int, Tensor]] = {}
        drafter.bind(model, DrafterCache(kv_store=kv_store, backend=backend, device=device))

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run the plan; see Runner.execute."""
        rows = select_logits_rows(plan.requests)
        batch = build_batch(plan, kv_block_size=self._kv_store.kv_block_size)
        output = self._forward(batch, _join(rows, self._max_logits_rows))
        hidden_states = output.hidden_states
        self._record(plan, output)
        results = [RequestResult(request_id=r.request_id) for r in plan.requests]
        for chunk in _split_by_rows(rows, self._max_logits_rows):
            requests = [plan.requests[index] for index in chunk]
            # Logits that came with the step are those of all rows that need any.
            logits = output.logits
            if logits is None:
                selected = _select_rows(hidden_states, [rows[index] for index in chunk])
                logits = self._model.compute_logits(selected)
            draft_probs = [self._take_draft_probs(request) for request in requests]
            verified = self._verifier.verify(logits, requests, draft_probs)
            for index, result in zip(chunk, verified, strict=True):
                results[index] = result
        self._add_prompt_logprobs(plan, hidden_states, results)
        return StepResult(results=results)

    @torch.inference_mode()
    def draft(self, requests: Sequence[DraftRequest]) -> list[RequestDraft]:
        """Propose for these requests; see Runner.draft."""
        proposal = self._drafter.propose(requests)
        drafts = []
        for index, request in enumerate(requests):
            # NOTE: a drafter may be deterministic this time; an earlier q is not this draft's.
            self._draft_probs.pop(request.request_id, None)
            token_ids = proposal.draft_token_ids[index]
            probs = None if proposal.draft_probs is None else proposal.draft_probs[index]
            if probs is not None:
                self._draft_probs[request.request_id] = (
                    request.generation,
                    probs[: len(token_ids)],
                )
            drafts.append(
                RequestDraft(
                    request_id=request.request_id,
                    token_ids=token_ids,
                    confidence=_pick(proposal.confidence, index),
                    evidence=_pick(proposal.evidence, index),
                    is_drawn=probs is not None,
                    num_drafter_computed_tokens=_pick(proposal.num_computed_tokens, index) or 0,
                )
            )
        return drafts

    def release(self, request_ids: Sequence[str]) -> None:
        """Forget these requests everywhere."""
        self._drafter.release(request_ids)
        self._verifier.release(request_ids)
        for request_id in request_ids:
            self._draft_probs.pop(request_id, None)

    def _forward(self, batch: StepBatch, logits_rows: range) -> ModelOutput:
        token_ids = self._to_device(batch.token_ids)
        positions = self._to_device(batch.positions)
        metadata = self._backend.prepare(batch.attention, self._kv_store)
        attention = AttentionContext(
            backend=self._backend, kv_store=self._kv_store, metadata=metadata
        )
        taps = self._target_layer_ids
        output = self._model.forward(token_ids, positions, attention, taps, logits_rows)
        if self._drafter.capabilities.target_layer_ids:
            assert output.aux_hidden_states is not None, "a tapped model returns its taps"
            self._drafter.ingest(output.aux_hidden_states, token_ids, positions, attention)
        return output

    def _record(self, plan: StepPlan, output: ModelOutput) -> None:
        """Give the step's hidden states to whoever records them."""
        if self._sink is None:
            return
        computed, start = [], 0
        for request in plan.requests:
            rows = range(start, start + request.num_rows)
            start = rows.stop
            computed.append(
                ComputedRows(
                    request_id=request.request_id, position=request.num_computed_tokens, rows=rows
                )
            )
        assert output.aux_hidden_states is not None, "a tapped model returns its taps"
        self._sink.take(computed, output.aux_hidden_states, output.hidden_states)

    def _take_draft_probs(self, request: ScheduledRequest) -> Tensor | None:
        """Return the q of the admitted drafts, or None when they are deterministic.

        A draft lives until the next step of its request; the one after may come from a lookup.
        """
        generation, probs = self._draft_probs.pop(request.request_id, (-1, None))
        if probs is None or not request.draft_token_ids:
            return None
        assert generation == request.generation, "drafts outlived a preemption"
        return probs[: len(request.draft_token_ids)]

    def _add_prompt_logprobs(
        self, plan: StepPlan, hidden_states: Tensor, results: list[RequestResult]
    ) -> None:
        """Fill in logprobs of prompt tokens for the requests that asked, in bounded pieces."""
        start_row = 0
        for request, result in zip(plan.requests, results, strict=True):
            first, start_row = start_row, start_row + request.num_rows
            # Row at position p predicts token p + 1; the last prompt row predicts output.
            num_rows = min(
                request.num_new_tokens, request.num_prompt_tokens - 1 - request.num_computed_tokens
            )
            if request.params.prompt_logprobs is None or num_rows < 0 or result.error is not None:
                continue
            result.prompt_logprobs = []
            for offset in range(0, num_rows, self._max_logits_rows):
                end = min(offset + self._max_logits_rows, num_rows)
                hidden = hidden_states[first + offset : first + end]
                result.prompt_logprobs += self._score_prompt(request, hidden, offset)

    def _score_prompt(
        self, request: ScheduledRequest, hidden: Tensor, offset: int
    ) -> list[TokenLogprobs]:
        start = request.num_computed_tokens + offset + 1
        token_ids = request.token_ids[start : start + len(hidden)]
        num_top = [request.params.prompt_logprobs or 0] * len(token_ids)
        logits = self._model.compute_logits(hidden)
        return compute_logprobs(logits, range(len(token_ids)), token_ids, num_top)

    def _to_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def _choose_taps(drafter: Drafter, sink: HiddenStateSink | None) -> tuple[int, ...]:
    """Return the layers to tap: the drafter's, or those that are recorded."""
    taps = drafter.capabilities.target_layer_ids
    if sink is None:
        return taps
    if taps:
        raise ConfigError(
            "hidden states cannot be recorded while a drafter taps the target; use "
            '{"method": "none"}.'
        )
    return sink.target_layer_ids


def count_logits_rows(vocab_size: int) -> int:
    """Return how many rows of float32 logits are held at once."""
    return max(1, MAX_LOGITS_BYTES // (4 * vocab_size))


def _pick(values: Sequence[T] | None, index: int) -> T | None:
    return None if values is None else values[index]


def _join(spans: Sequence[range], limit: int) -> range:
    """Return the rows of all spans if they are neighbours and within the limit, else none."""
    wanted = [span for span in spans if span]
    if not wanted:
        return range(0)
    whole = range(wanted[0].start, wanted[-1].stop)
    return whole if sum(map(len, wanted)) == len(whole) <= limit else range(0)


def _select_rows(hidden_states: Tensor, spans: Sequence[range]) -> Tensor:
    """Return the rows of some spans; neighbouring ones, as in most steps, as a view."""
    whole = _join(spans, len(hidden_states))
    if whole:
        return hidden_states[whole.start : whole.stop]
    rows = torch.tensor([row for span in spans for row in span], device=hidden_states.device)
    return hidden_states[rows]


def _split_by_rows(rows: Sequence[range], limit: int) -> Iterator[list[int]]:
    """Yield request indices in groups whose rows fit the limit (a group has at least one)."""
    group: list[int] = []
    total = 0
    for index, wanted in enumerate(rows):
        if len(wanted) == 0:
            continue
        if group and total + len(wanted) > limit:
            yield group
            group, total = [], 0
        group.append(index)
        total += len(wanted)
    if group:
        yield group

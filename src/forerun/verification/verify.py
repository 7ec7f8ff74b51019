"""The entry point: one step's logits and drafts -> one result per request.

Groups a mixed batch by method, runs each group vectorised, adds logprobs of the raw distribution,
and keeps failures apart: a request whose logits are not finite, or whose sampling raises, gets an
error of its own. Shapes: L rows of the step, V vocabulary, m drafts of one request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from forerun.errors import RequestError
from forerun.logs import get_logger
from forerun.plan import RequestResult, ScheduledRequest
from forerun.sampling.logprobs import compute_logprobs
from forerun.sampling.method import DEFAULT_METHODS, choose_method
from forerun.sampling.penalties import LogitsProcessors, needs_processing
from forerun.verification.layout import VerifyLayout
from forerun.verification.methods import Verdict, verify_coupled, verify_greedy, verify_standard
from forerun.verification.synthetic import SyntheticRates, VerifyRows

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Job:
    """One request, its first row in the step's logits, and its drafts' probabilities [m, V]."""

    request: ScheduledRequest
    row_start: int
    draft_probs: Tensor | None


class Verifier:
    """Verifies drafts without loss. Keeps only what penalties need, until `release`.

    `default_method` applies to sampled requests without a seed; with one they are coupled. The
    exception is "synthetic", which accepts the drafts of every request by `survival_rates`.
    """

    def __init__(
        self, default_method: str = "standard", survival_rates: Sequence[float] | None = None
    ) -> None:
        self._synthetic: SyntheticRates | None = None
        if default_method == "synthetic":
            assert survival_rates is not None, "synthetic acceptance needs rates"
            logger.warning("synthetic acceptance %s: the text is not the model's", survival_rates)
            self._synthetic = SyntheticRates(survival_rates)
            default_method = "standard"
        assert default_method in DEFAULT_METHODS, default_method
        self._default_method = default_method
        self._processors = LogitsProcessors()

    def verify(
        self,
        logits: Tensor,
        requests: Sequence[ScheduledRequest],
        draft_probs: Sequence[Tensor | None] | None = None,
    ) -> list[RequestResult]:
        """Return results in the order of `requests`, all of which must sample.

        `logits` [L, V] float32 are raw and stay unchanged; request i owns the next 1 + m_i rows.
        `draft_probs[i]` is the float32 [>= m_i, V] tensor the drafts were drawn from, or None.
        """
        layout = VerifyLayout(requests)
        assert layout.num_rows == len(logits), (layout.num_rows, len(logits))
        assert all(request.samples for request in requests), "prefill chunks have no verdict"
        given = draft_probs if draft_probs is not None else [None] * len(requests)
        groups: dict[str, list[int]] = {}
        jobs = [_Job(*job) for job in zip(requests, layout.starts, given, strict=True)]
        for place, job in enumerate(jobs):
            groups.setdefault(self._choose_method(job), []).append(place)
        results: dict[int, RequestResult] = {}
        for method, places in groups.items():
            group = [jobs[place] for place in places]
            results.update(zip(places, self._verify_safely(method, group, logits), strict=True))
        return [results[place] for place in range(len(jobs))]

    def release(self, request_ids: Iterable[str]) -> None:
        """Forget these requests; unknown ids are ignored."""
        self._processors.release(request_ids)

    def _choose_method(self, job: _Job) -> str:
        method = choose_method(job.request.params, self._default_method)
        if method != "standard":
            return method
        has_probs = job.draft_probs is not None and len(job.request.draft_token_ids) > 0
        return "standard" if has_probs and self._synthetic is None else "standard_one_hot"

    def _verify_safely(
        self, method: str, group: Sequence[_Job], logits: Tensor
    ) -> list[RequestResult]:
        """Verify a group; if that raises, each request alone, so that one cannot fail another."""
        try:
            return self._verify_group(method, group, logits)
        except Exception:
            if len(group) > 1:
                logger.warning("sampling a group failed; retrying one by one", exc_info=True)
                return [self._verify_safely(method, [job], logits)[0] for job in group]
            request_id = group[0].request.request_id
            logger.exception("sampling failed for request %s", request_id)
            return [_build_failure(request_id, "an error occurred while sampling this request")]

    def _verify_group(
        self, method: str, group: Sequence[_Job], logits: Tensor
    ) -> list[RequestResult]:
        layout = VerifyLayout([job.request for job in group])
        rows = self._process_rows(logits, group, layout)
        verify = _find_method(method, group)
        if self._synthetic is None:
            verdicts = verify(rows, layout)
        else:
            verdicts = self._synthetic.verify(rows, layout, verify)
        results = [
            _build_result(job.request, verdict)
            for job, verdict in zip(group, verdicts, strict=True)
        ]
        _add_logprobs(logits, group, results)
        return results

    def _process_rows(self, logits: Tensor, group: Sequence[_Job], layout: VerifyLayout) -> Tensor:
        """Return the group's rows, processed. Copies only what it must: logits stay as they are."""
        is_whole = layout.num_rows == len(logits)
        if not is_whole:
            rows = [
                row
                for job in group
                for row in range(
                    job.row_start, job.row_start + 1 + len(job.request.draft_token_ids)
                )
            ]
            logits = logits[torch.tensor(rows, device=logits.device)]
        affected = [i for i, request in enumerate(layout.requests) if needs_processing(request)]
        if affected:
            logits = logits.clone() if is_whole else logits
            starts = [layout.starts[i] for i in affected]
            self._processors.apply_(logits, [layout.requests[i] for i in affected], starts)
        return logits


def _find_method(method: str, group: Sequence[_Job]) -> VerifyRows:
    if method == "greedy":
        return verify_greedy
    if method == "coupled":
        return verify_coupled
    if method == "standard_one_hot":
        return partial(verify_standard, draft_probs=None)
    given = [job.draft_probs for job in group if job.draft_probs is not None]
    return partial(verify_standard, draft_probs=given)


def _build_result(request: ScheduledRequest, verdict: Verdict) -> RequestResult:
    if not verdict.is_finite:
        return _build_failure(request.request_id, "the model's logits were not finite")
    return RequestResult(
        request_id=request.request_id,
        token_ids=verdict.token_ids,
        num_accepted_tokens=verdict.num_accepted,
    )


def _build_failure(request_id: str, reason: str) -> RequestResult:
    message = f"{reason}; this request was stopped, others are not affected. Send it again."
    error = RequestError(message, status=500, code="sampling_failed")
    return RequestResult(request_id=request_id, error=error)


def _add_logprobs(logits: Tensor, group: Sequence[_Job], results: Sequence[RequestResult]) -> None:
    """Fill in the raw logprobs of the emitted tokens of those requests that asked."""
    if all(job.request.params.logprobs is None for job in group):
        return
    asking = [
        (job, result, job.request.params.logprobs)
        for job, result in zip(group, results, strict=True)
        if job.request.params.logprobs is not None and result.error is None
    ]
    rows = [job.row_start + i for job, result, _ in asking for i in range(len(result.token_ids))]
    token_ids = [token for _, result, _ in asking for token in result.token_ids]
    num_top = [count or 0 for _, result, count in asking for _ in result.token_ids]
    entries = iter(compute_logprobs(logits, rows, token_ids, num_top))
    for _, result, _ in asking:
        result.logprobs = [next(entries) for _ in result.token_ids]

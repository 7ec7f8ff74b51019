"""The one place where tokens become output.

Stop ids, EOS, max_tokens, min_tokens, stop strings, usage counts, logprobs and streamed text all
see committed tokens, one at a time, here (design rule 3). What a verify pass accepted past a stop
is never visible to anything else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.core import (
    FinishReason,
    Request,
    RequestOutput,
    SpecRequestStats,
    TokenLogprobs,
)
from forerun.engine.detokenizer import IncrementalDetokenizer
from forerun.errors import RequestError
from forerun.plan import RequestResult, ScheduledRequest
from forerun.tokenization import Tokenizer


@dataclass(slots=True)
class _Stream:
    """Output state of one request."""

    detokenizer: IncrementalDetokenizer
    spec_stats: SpecRequestStats = field(default_factory=SpecRequestStats)
    num_prompt_logprobs: int = 0


@dataclass(slots=True)
class CommittedStep:
    """One request's output of a step, and how many of its accepted drafts became output."""

    output: RequestOutput
    num_accepted_tokens: int


class Committer:
    """Commits verified tokens to requests and builds their outputs."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._streams: dict[str, _Stream] = {}

    def open(self, request: Request) -> None:
        """Start the output state of a request."""
        params = request.params
        detokenizer = IncrementalDetokenizer(
            self._tokenizer,
            prompt_token_ids=request.token_ids[: request.num_prompt_tokens],
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )
        self._streams[request.request_id] = _Stream(detokenizer)

    def close(self, request: Request) -> None:
        """Drop the output state; unknown requests are ignored."""
        self._streams.pop(request.request_id, None)

    def commit(
        self, request: Request, scheduled: ScheduledRequest, result: RequestResult
    ) -> CommittedStep:
        """Commit a step's tokens one by one until one of them finishes the request.

        Whatever goes wrong here is this request's failure alone: it ends with an error output.
        """
        stream = self._streams[request.request_id]
        output = RequestOutput(request_id=request.parent_id, choice_index=request.choice_index)
        try:
            if result.error is not None:
                raise result.error
            self._commit_tokens(request, stream, result, output)
            _add_prompt_logprobs(stream, scheduled, result, output)
        except RequestError as error:
            _fail(request, output, error)
        except Exception as error:  # noqa: BLE001 - one request must not take others down
            failure = f"output processing failed: {type(error).__name__}: {error}"
            _fail(request, output, RequestError(failure, status=500, code="internal_error"))
        accepted = min(result.num_accepted_tokens, len(output.token_ids))
        if scheduled.draft_token_ids:
            _count_speculation(stream.spec_stats, len(scheduled.draft_token_ids), accepted)
        self._describe(request, stream, output)
        return CommittedStep(output, accepted)

    def count_drafted(self, request: Request, num_draft_tokens: int) -> None:
        """Record that tokens were drafted for this request."""
        self._streams[request.request_id].spec_stats.num_draft_tokens += num_draft_tokens

    def end(
        self, request: Request, reason: FinishReason, error: RequestError | None = None
    ) -> RequestOutput:
        """Finish a request from outside (abort, failed step) and return its last output."""
        stream = self._streams[request.request_id]
        output = RequestOutput(request_id=request.parent_id, choice_index=request.choice_index)
        output.text = stream.detokenizer.finish()
        output.error = error
        output.finish_reason = request.finish_reason = reason
        self._describe(request, stream, output)
        return output

    def _commit_tokens(
        self, request: Request, stream: _Stream, result: RequestResult, output: RequestOutput
    ) -> None:
        pieces: list[str] = []
        for token_id in result.token_ids:
            request.token_ids.append(token_id)
            output.token_ids.append(token_id)
            pieces.append(self._push(request, stream, token_id))
            if request.finish_reason is not None:
                break
        if request.finish_reason is not None and not isinstance(request.stop_reason, str):
            pieces.append(stream.detokenizer.finish())
        output.text = "".join(pieces)
        if result.logprobs is not None:
            output.logprobs = result.logprobs[: len(output.token_ids)]

    def _push(self, request: Request, stream: _Stream, token_id: int) -> str:
        """Apply the stop rules to one committed token; return the text it releases."""
        params = request.params
        may_stop = request.num_output_tokens >= params.min_tokens
        is_eos = token_id in request.eos_token_ids and not params.ignore_eos
        if may_stop and (is_eos or token_id in params.stop_token_ids):
            request.finish_reason = FinishReason.STOP
            request.stop_reason = None if is_eos else token_id
            if not params.include_stop_str_in_output:
                return ""
        pushed = stream.detokenizer.push(token_id)
        if request.finish_reason is None and pushed.stop_string is not None:
            request.finish_reason = FinishReason.STOP
            request.stop_reason = pushed.stop_string
        if request.finish_reason is None and request.num_remaining_tokens == 0:
            request.finish_reason = FinishReason.LENGTH
        return pushed.text_delta

    def _describe(self, request: Request, stream: _Stream, output: RequestOutput) -> None:
        """Fill in the running counts every output carries."""
        output.finish_reason = request.finish_reason
        output.stop_reason = request.stop_reason
        output.num_prompt_tokens = request.num_prompt_tokens
        output.num_cached_tokens = request.num_cached_tokens or 0
        output.num_output_tokens = request.num_output_tokens
        if request.first_scheduled_s is not None:
            output.queue_s = max(0.0, request.first_scheduled_s - request.arrival_s)
        if output.finish_reason is not None:
            output.spec_stats = stream.spec_stats


def _fail(request: Request, output: RequestOutput, error: RequestError) -> None:
    request.finish_reason = FinishReason.ERROR
    output.error = error


def _count_speculation(stats: SpecRequestStats, verified: int, accepted: int) -> None:
    stats.num_spec_steps += 1
    stats.num_verified_tokens += verified
    stats.num_accepted_tokens += accepted
    stats.verified_per_step.append(verified)
    stats.accepted_per_step.append(accepted)


def _add_prompt_logprobs(
    stream: _Stream,
    scheduled: ScheduledRequest,
    result: RequestResult,
    output: RequestOutput,
) -> None:
    """Emit each prompt position once, also when a preempted prompt is computed again."""
    if result.prompt_logprobs is None:
        return
    entries: list[TokenLogprobs | None] = list(result.prompt_logprobs)
    if scheduled.num_computed_tokens == 0:
        entries.insert(0, None)  # nothing predicts the first token
        first = 0
    else:
        first = scheduled.num_computed_tokens + 1
    fresh = entries[max(0, stream.num_prompt_logprobs - first) :]
    stream.num_prompt_logprobs += len(fresh)
    if fresh:
        output.prompt_logprobs = fresh

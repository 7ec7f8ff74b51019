"""Values that every part of Forerun shares: sampling parameters, requests, outputs. No torch.

A `Request` is one choice of one API call (n = 3 makes three). It knows its committed tokens and
how many of them have K/V in the cache; the difference is its *gap*, and closing gaps is all the
scheduler does. Nothing here knows about phases.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from numbers import Integral, Real

from forerun.errors import RequestError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
SEED_LIMIT = 2**63


class FinishReason(enum.StrEnum):
    """Why a request ended, in OpenAI's words where OpenAI has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestStatus(enum.Enum):
    """Where a request is. Preempted requests wait again, with nothing computed."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop. Raises RequestError naming the field at fault.

    `temperature` 0 is greedy. `top_k` 0 or -1 and `top_p` 1 switch the filter off. `max_tokens`
    None means as many as the context allows. A `seed` selects the `coupled` verifier. A `stop`
    that is one string is the same as a tuple of it.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if _is_kind(self.stop, str):
            # NOTE: taken as a sequence it would stop at each of its characters.
            object.__setattr__(self, "stop", (self.stop,))
        _check_integer("n", self.n, 1, 128)
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_integer("top_k", self.top_k, -1, 2**31 - 1)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_open=True)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for _, bias in self.logit_bias:
            _check_range("logit_bias", bias, -100.0, 100.0)
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens}).",
                param="min_tokens",
            )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(
                f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed.",
                param="stop",
            )
        if any(not text for text in self.stop):
            raise RequestError("stop strings must not be empty.", param="stop")
        if self.seed is not None:
            _check_integer("seed", self.seed, -SEED_LIMIT, SEED_LIMIT - 1)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _check_integer(name, value, 0, MAX_LOGPROBS)

    @property
    def is_greedy(self) -> bool:
        """Whether the next token is the argmax of the processed logits."""
        return self.temperature < 1e-5

    @property
    def is_filtered(self) -> bool:
        """Whether sampling leaves tokens out by rank or probability."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens seen so far."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


def _check_range(
    name: str, value: float, low: float, high: float, *, low_open: bool = False
) -> None:
    # NaN is inside of nothing; integers of any size compare, but need not convert to float.
    if (
        not _is_kind(value, Real)
        or not (low < value if low_open else low <= value)
        or not value <= high
    ):
        bracket = "(" if low_open else "["
        raise RequestError(f"{name} must be in {bracket}{low}, {high}], got {value}.", param=name)


def _check_integer(name: str, value: int, low: int, high: int) -> None:
    if not _is_kind(value, Integral):
        raise RequestError(f"{name} must be an integer, got {value!r}.", param=name)
    _check_range(name, value, low, high)


def _is_kind(value: object, kind: type) -> bool:
    """Whether a value is what its annotation says; a bool is no number here."""
    return isinstance(value, kind) and not isinstance(value, bool)


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One choice being generated. Owned by the scheduler; others read it.

    `request_id` is unique per choice, `parent_id` is the API call's id that outputs carry.

    Invariants: `token_ids` starts with the prompt and only grows; `num_computed_tokens <
    len(token_ids)` while unfinished (the last committed token, the anchor, is never computed);
    `num_drafter_computed_tokens <= num_computed_tokens` between steps (what is beyond, after
    drafting, counts as far as the drafts are accepted; 0 for drafters without a gap of their own);
    `draft_token_ids` is empty unless the gap is exactly one. `generation` counts preemptions, so
    that anything keyed by (request_id, generation) made before one is recognisably stale. `slot` is
    the request's place in the budget's memory while it runs.
    """

    request_id: str
    parent_id: str
    params: SamplingParams
    token_ids: list[int]
    num_prompt_tokens: int
    seed: int
    eos_token_ids: frozenset[int] = frozenset()
    choice_index: int = 0
    leader_id: str | None = None
    arrival_s: float = 0.0
    max_total_tokens: int = 2**31

    status: RequestStatus = RequestStatus.WAITING
    generation: int = 0
    num_computed_tokens: int = 0
    num_drafter_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    num_draws: int = 0
    draft_token_ids: list[int] = field(default_factory=list)
    slot: int = -1
    first_scheduled_s: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def num_output_tokens(self) -> int:
        """Committed tokens after the prompt."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def gap(self) -> int:
        """Committed tokens that have no K/V yet."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens that may still be committed before max_tokens or the context limit."""
        remaining = self.max_total_tokens - len(self.token_ids)
        if self.params.max_tokens is not None:
            remaining = min(remaining, self.params.max_tokens - self.num_output_tokens)
        return remaining

    @property
    def banned_token_ids(self) -> frozenset[int]:
        """Tokens that may not be emitted before `min_tokens`: everything that would stop it."""
        if self.params.min_tokens == 0:
            return frozenset()
        eos = frozenset() if self.params.ignore_eos else self.eos_token_ids
        return eos.union(self.params.stop_token_ids)

    @property
    def bypasses_prefix_cache(self) -> bool:
        """Prompt logprobs need logits of every prompt row, so nothing may be skipped."""
        return self.params.prompt_logprobs is not None

    def drop_drafts(self) -> None:
        """Forget the pending proposal."""
        self.draft_token_ids = []


@dataclass(slots=True, kw_only=True)
class TokenLogprobs:
    """Raw-distribution logprobs at one position: the token's own, and the most likely ones."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


@dataclass(slots=True, kw_only=True)
class SpecRequestStats:
    """Speculation totals of one request; `num_accepted_tokens` excludes bonus and recovered."""

    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_verified_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_step: list[int] = field(default_factory=list)
    verified_per_step: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """What one step adds to one request. Deltas only; they concatenate to the whole.

    `token_ids` may be non-empty while `text` is empty (held back for UTF-8 or a stop prefix) and
    the reverse. `finish_reason` is set exactly once, on the last output of the request.
    """

    request_id: str
    choice_index: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    spec_stats: SpecRequestStats | None = None
    queue_s: float | None = None
    error: RequestError | None = None

"""All that crosses between scheduler and runner. No torch, so a simulator can answer it.

A StepPlan lists who computes which rows; a StepResult says which tokens came out. Rows of one
request are contiguous: first `num_new_tokens` committed tokens from `num_computed_tokens` on, then
the admitted draft tokens. Only a request whose committed tokens all end up computed samples
(`samples` is true); others are prefill chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from forerun.core import SamplingParams, TokenLogprobs
from forerun.errors import RequestError


@dataclass(slots=True, kw_only=True)
class ScheduledRequest:
    """One request's share of a step.

    `token_ids` is the live committed list (prompt + output): read it, never write or keep it.
    `num_draws` is the request's step counter for random streams; it never repeats.
    """

    request_id: str
    generation: int
    token_ids: Sequence[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    num_new_tokens: int
    draft_token_ids: Sequence[int]
    block_table: Sequence[int]
    params: SamplingParams
    seed: int
    choice_index: int
    num_draws: int
    banned_token_ids: frozenset[int] = frozenset()

    @property
    def num_rows(self) -> int:
        """Rows given to the target this step."""
        return self.num_new_tokens + len(self.draft_token_ids)

    @property
    def samples(self) -> bool:
        """Whether this step reaches the end of the committed tokens."""
        return self.num_computed_tokens + self.num_new_tokens == len(self.token_ids)


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """One target forward. `requests` with drafts or one row come before prefill chunks."""

    step: int
    requests: list[ScheduledRequest]

    @property
    def num_rows(self) -> int:
        """Rows of the whole step."""
        return sum(request.num_rows for request in self.requests)


@dataclass(slots=True, kw_only=True)
class RequestResult:
    """What verification decided for one request.

    `token_ids` is the accepted prefix plus the next token (empty for a prefill chunk);
    `num_accepted_tokens` excludes that next token. `logprobs` has one entry per token of
    `token_ids` when asked for; `prompt_logprobs` one per prompt row computed this step, each for
    the token *after* that row. `error` fails this request alone.
    """

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    num_accepted_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: RequestError | None = None


@dataclass(slots=True, kw_only=True)
class StepResult:
    """Results in the order of `StepPlan.requests`."""

    results: list[RequestResult]


@dataclass(slots=True, kw_only=True)
class DraftRequest:
    """A request that should draft up to `depth` tokens after its committed tokens.

    The same rules as for ScheduledRequest apply to `token_ids`. `num_drafter_computed_tokens`
    counts leading committed tokens whose K/V the drafter already has in its own layers of the pool
    (drafters with a gap of their own only).
    """

    request_id: str
    generation: int
    token_ids: Sequence[int]
    depth: int
    block_table: Sequence[int]
    params: SamplingParams
    seed: int
    choice_index: int
    num_draws: int
    num_drafter_computed_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class RequestDraft:
    """The proposal of one request.

    `confidence` and `evidence` have one entry per token and are functions of the prefix alone.
    Confidence is a drafter's own estimate that the token is accepted if those before it were;
    evidence is a number in log-odds that goes up with that chance (the logit of max q, the length
    of a match), to be calibrated from outcomes. A drafter gives one of them, or neither. `is_drawn`
    says that tokens were drawn from q and are accepted by p / q: the non-anticipating rule binds.
    `num_drafter_computed_tokens` says how many leading positions, drafts included, the drafter has
    K/V of now; it counts as far as the drafts are accepted.
    """

    request_id: str
    token_ids: list[int]
    confidence: list[float] | None = None
    evidence: list[float] | None = None
    is_drawn: bool = False
    num_drafter_computed_tokens: int = 0


class Runner(Protocol):
    """The seam between host decisions and computation.

    Implementations: ModelRunner (torch), a tensor-parallel one, and the simulator's. A runner keeps
    no scheduling state. Anything it caches per request is keyed by (request_id, generation) and
    dropped by `release`. `execute` may raise: the engine then fails the requests of that step and
    goes on.
    """

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the target over all rows of the plan, verify, and return tokens per request."""
        ...

    def draft(self, requests: Sequence[DraftRequest]) -> list[RequestDraft]:
        """Propose tokens for these requests, in this order; may return fewer than asked."""
        ...

    def release(self, request_ids: Sequence[str]) -> None:
        """Forget everything about these requests."""
        ...

"""What crosses between the API process and the engine process. Plain data, no torch.

One message per step each way: the client batches what arrived since the last step, the engine
answers with one StepMessage per step. Everything pickles.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from forerun.budget.confidence.calibration import CalibrationSnapshot
from forerun.core import RequestOutput, SamplingParams


@dataclass(slots=True, kw_only=True)
class NewRequest:
    """One API prompt; `params.n` choices are made from it. `arrival_s` is time.monotonic()."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class ClientMessage:
    """Everything the client has to say at once."""

    new_requests: list[NewRequest] = field(default_factory=list)
    aborted_ids: list[str] = field(default_factory=list)
    reset_prefix_cache: bool = False
    shutdown: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Facts of the running engine that decide which requests can be served."""

    max_model_len: int
    vocab_size: int
    num_kv_blocks: int
    kv_block_size: int
    max_waiting_requests: int

    @property
    def num_kv_tokens(self) -> int:
        """Tokens the KV pool holds."""
        return self.num_kv_blocks * self.kv_block_size


@dataclass(slots=True, kw_only=True)
class ReadyMessage:
    """First message of the engine. `info` is the JSON-ready body of /server_info."""

    limits: EngineLimits
    info: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class LoadingMessage:
    """Progress of one stage of starting, before ReadyMessage."""

    stage: str
    done: int
    total: int


@dataclass(slots=True, kw_only=True)
class FailedMessage:
    """The engine could not start (`is_config_error`) or died; one sentence for the user."""

    message: str
    is_config_error: bool


@dataclass(slots=True, kw_only=True)
class StepStats:
    """Gauges after a step, and counts of that step alone (add them up to get totals).

    Drafted >= verified >= accepted; committed counts tokens that became output. Per-position lists
    are indexed by draft position 0..k-1. `step_s` is the whole step as the user pays for it;
    `draft_s` its drafting; the predicted times are 0 without a cost model. `budget_state` says
    whether verification adapts, and if not why; `calibration` comes with some steps only.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_usage_frac: float = 0.0
    num_prompt_tokens: int = 0
    num_committed_tokens: int = 0
    num_preemptions: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_lookup_tokens: int = 0  # of these, copied from the request's own text
    num_verified_tokens: int = 0
    num_accepted_tokens: int = 0
    verified_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    verification_budget: int = 0
    num_rows: int = 0
    num_drafting: int = 0  # requests asked to draft
    num_probes: int = 0
    step_s: float = 0.0
    host_s: float = 0.0
    draft_s: float = 0.0
    predicted_step_s: float = 0.0
    predicted_draft_s: float = 0.0
    budget_state: str = ""
    calibration: CalibrationSnapshot | None = None


@dataclass(slots=True, kw_only=True)
class StepMessage:
    """Outputs and stats of one step (or of bookkeeping between steps)."""

    outputs: list[RequestOutput]
    stats: StepStats

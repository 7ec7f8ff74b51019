"""A scripted engine behind the Transport contract, and a tokenizer whose ids are bytes.

One token is one byte; 256 ends an answer; 257 starts a prompt. The engine answers from a script,
`tokens_per_step` tokens per choice and step, on whichever thread calls `receive`. Everything that
happened to it is recorded, and tests wait for it by condition, never by time.
"""

from __future__ import annotations

import codecs
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from forerun.core import (
    FinishReason,
    RequestOutput,
    SamplingParams,
    SpecRequestStats,
    TokenLogprobs,
)
from forerun.engine.messages import (
    ClientMessage,
    EngineLimits,
    FailedMessage,
    NewRequest,
    ReadyMessage,
    StepMessage,
    StepStats,
)
from forerun.errors import RequestError
from forerun.server.app import build_app
from forerun.server.context import ServerContext
from forerun.server.prometheus import ServerMetrics
from forerun.transport.async_engine import AsyncEngine
from forerun.transport.pipe import EngineMessage

EOS, BOS = 256, 257
WAIT_S = 20.0
LIMITS = EngineLimits(
    max_model_len=200, vocab_size=258, num_kv_blocks=100, kv_block_size=4, max_waiting_requests=8
)


class FakeTokenizer:
    """Ids are bytes. A conversation reads "<role>content" per message."""

    special_token_ids = frozenset({EOS, BOS})

    def __init__(self, defaults: Mapping[str, float] | None = None) -> None:
        self.generation_defaults = dict(defaults or {})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        if "bad" in kwargs:
            raise RequestError("the template does not take these messages.", param="messages")
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return self.encode(text + "<assistant>" * add_generation_prompt, add_special_tokens=False)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        skipped = self.special_token_ids if skip_special_tokens else ()
        data = b"".join(self.token_bytes(token) for token in token_ids if token not in skipped)
        return data.decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return {EOS: b"<eos>", BOS: b"<bos>"}.get(token_id) or bytes([token_id])


@dataclass
class Script:
    """What to answer: text per choice, then how it ends.

    `holds` never finishes; `fails_with` ends the first choice that has said everything.
    """

    texts: tuple[str, ...] = ("Hello",)
    holds: bool = False
    fails_with: RequestError | None = None
    num_cached_tokens: int = 0


@dataclass
class _Running:
    """One choice being answered."""

    request: NewRequest
    index: int
    script: Script
    rest: list[int]
    decoder: codecs.IncrementalDecoder = field(
        default_factory=codecs.getincrementaldecoder("utf-8")
    )
    num_output: int = 0
    spec: SpecRequestStats = field(default_factory=SpecRequestStats)


class FakeEngine:
    """Implements Transport. `scripts` maps a word of the prompt to its script."""

    def __init__(
        self,
        script: Script | None = None,
        *,
        tokens_per_step: int = 2,
        limits: EngineLimits = LIMITS,
        first_message: EngineMessage | None = None,
    ) -> None:
        self.script = script or Script()
        self.scripts: dict[str, Script] = {}
        self.refusal: RequestError | None = None
        self.sent: list[ClientMessage] = []
        self.aborted_ids: list[str] = []
        self.received: dict[str, NewRequest] = {}
        self.num_resets = 0
        self.is_closed = False
        self._tokens_per_step = tokens_per_step
        self._condition = threading.Condition()
        self._outbox: list[EngineMessage] = [
            first_message or ReadyMessage(limits=limits, info={"policy": "fixed"})
        ]
        self._running: list[_Running] = []
        self._death: str | None = None

    # The Transport contract.

    def send(self, message: ClientMessage) -> None:
        with self._condition:
            if self.is_closed or self._death is not None:
                raise BrokenPipeError
            self.sent.append(message)
            self.num_resets += message.reset_prefix_cache
            for request in message.new_requests:
                self._admit(request)
            for request_id in message.aborted_ids:
                self._abort(request_id)
            self._condition.notify_all()

    def receive(self) -> EngineMessage:
        with self._condition:
            self._condition.wait_for(lambda: self._can_speak)
            if self._outbox:
                return self._outbox.pop(0)
            if self.is_closed or self._death is not None:
                raise EOFError
            return self._step()

    def describe_exit(self) -> str:
        return self._death or "closed"

    def close(self, timeout_s: float) -> None:
        with self._condition:
            self.is_closed = True
            self._condition.notify_all()

    # What tests do to it.

    def die(self, reason: str) -> None:
        """End as a killed process would."""
        with self._condition:
            self._death = reason
            self._condition.notify_all()

    def say(self, message: EngineMessage) -> None:
        """Send a message of the test's own."""
        with self._condition:
            self._outbox.append(message)
            self._condition.notify_all()

    def release(self) -> None:
        """Let requests that hold finish."""
        with self._condition:
            for choice in self._running:
                choice.script = Script(choice.script.texts)
            self._condition.notify_all()

    def wait_until(self, is_true: Callable[[FakeEngine], bool]) -> None:
        """Block until a condition on the record holds."""
        with self._condition:
            assert self._condition.wait_for(lambda: is_true(self), WAIT_S), "it never happened"

    # The engine itself.

    @property
    def _can_speak(self) -> bool:
        is_over = self.is_closed or self._death is not None
        return bool(self._outbox) or is_over or any(not _is_waiting(c) for c in self._running)

    def _admit(self, request: NewRequest) -> None:
        self.received[request.request_id] = request
        if self.refusal is not None:
            output = RequestOutput(request_id=request.request_id, error=self.refusal)
            self._outbox.append(StepMessage(outputs=[output], stats=self._count()))
            return
        prompt = bytes(t for t in request.prompt_token_ids if t < EOS).decode(errors="replace")
        script = next((s for word, s in self.scripts.items() if word in prompt), self.script)
        for index in range(request.params.n):
            text = script.texts[index % len(script.texts)]
            rest = [*text.encode(), EOS]
            self._running.append(_Running(request, index, script, rest))

    def _abort(self, request_id: str) -> None:
        self.aborted_ids.append(request_id)
        self._running = [c for c in self._running if c.request.request_id != request_id]
        self._outbox.append(StepMessage(outputs=[], stats=self._count()))

    def _step(self) -> StepMessage:
        stats = StepStats(num_rows=len(self._running), step_s=0.01, host_s=0.001)
        outputs = [self._advance(c, stats) for c in self._running if not _is_waiting(c)]
        ended = {(o.request_id, o.choice_index) for o in outputs if o.finish_reason is not None}
        self._running = [c for c in self._running if (c.request.request_id, c.index) not in ended]
        return StepMessage(outputs=outputs, stats=self._count(stats))

    def _count(self, stats: StepStats | None = None) -> StepStats:
        stats = stats or StepStats()
        stats.num_running = len(self._running)
        stats.kv_usage_frac = len(self._running) / 10
        return stats

    def _advance(self, choice: _Running, stats: StepStats) -> RequestOutput:
        params = choice.request.params
        room = (params.max_tokens or LIMITS.max_model_len) - choice.num_output
        say = choice.rest[: min(self._tokens_per_step, room)]
        if choice.script.holds or choice.script.fails_with is not None:
            say = [token for token in say if token != EOS]
        first = choice.num_output == 0
        choice.rest = choice.rest[len(say) :]
        choice.num_output += len(say)
        output = RequestOutput(
            request_id=choice.request.request_id,
            choice_index=choice.index,
            token_ids=say,
            text=choice.decoder.decode(bytes(token for token in say if token < EOS)),
            num_prompt_tokens=len(choice.request.prompt_token_ids),
            num_cached_tokens=choice.script.num_cached_tokens,
            num_output_tokens=choice.num_output,
            queue_s=0.25,
        )
        _add_logprobs(output, choice.request, is_first=first)
        _count_speculation(choice, stats, output, is_first=first)
        self._finish(choice, output, room)
        return output

    def _finish(self, choice: _Running, output: RequestOutput, room: int) -> None:
        if EOS in output.token_ids:
            output.finish_reason = FinishReason.STOP
        elif len(output.token_ids) == room:
            output.finish_reason = FinishReason.LENGTH
        elif choice.rest == [EOS] and choice.script.fails_with is not None:
            output.finish_reason = FinishReason.ERROR
            output.error = choice.script.fails_with
        if output.finish_reason is not None:
            output.spec_stats = choice.spec


def _is_waiting(choice: _Running) -> bool:
    return choice.script.holds and choice.rest == [EOS]


def make_logprob(token_id: int, num_top: int) -> TokenLogprobs:
    """Return an entry whose second likeliest token is byte 0xff, which is no text."""
    top = [(token_id, -0.5), (0xFF, float("-inf"))][:num_top]
    return TokenLogprobs(token_id=token_id, logprob=-0.5, rank=1, top=top)


def _add_logprobs(output: RequestOutput, request: NewRequest, *, is_first: bool) -> None:
    params = request.params
    if params.logprobs is not None:
        output.logprobs = [make_logprob(token, params.logprobs) for token in output.token_ids]
    if params.prompt_logprobs is not None and is_first:
        rest = request.prompt_token_ids[1:]
        entries = [make_logprob(token, params.prompt_logprobs) for token in rest]
        output.prompt_logprobs = [None, *entries]


def _count_speculation(
    choice: _Running, stats: StepStats, output: RequestOutput, *, is_first: bool
) -> None:
    """Every step drafts 3 for the next one, which verifies 2 of them and accepts what it emits."""
    stats.num_committed_tokens += len(output.token_ids)
    if is_first:
        stats.num_prompt_tokens += len(choice.request.prompt_token_ids)
    else:
        accepted = min(2, max(0, len(output.token_ids) - 1))
        stats.num_spec_steps += 1
        stats.num_verified_tokens += 2
        stats.num_accepted_tokens += accepted
        stats.verification_budget += 2
        stats.verified_per_position = [stats.num_spec_steps, stats.num_spec_steps]
        stats.accepted_per_position = [stats.num_accepted_tokens]
        choice.spec.num_spec_steps += 1
        choice.spec.num_verified_tokens += 2
        choice.spec.num_accepted_tokens += accepted
        choice.spec.accepted_per_step.append(accepted)
        choice.spec.verified_per_step.append(2)
    stats.num_draft_tokens += 3
    choice.spec.num_draft_tokens += 3


def make_params(**options: Any) -> SamplingParams:
    """Return params with room for a short answer."""
    return SamplingParams(**{"max_tokens": 32, **options})


@asynccontextmanager
async def open_engine(fake: FakeEngine):
    """Start an AsyncEngine on a fake and shut it down in the end."""
    engine = AsyncEngine(lambda: fake)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.shutdown()


def make_context(engine: AsyncEngine, **options: Any) -> ServerContext:
    """Return the context of a server for the model `fake` with k = 3."""
    values: dict[str, Any] = {
        "engine": engine,
        "tokenizer": FakeTokenizer(),
        "metrics": ServerMetrics("fake"),
        "model_name": "fake",
        "num_speculative_tokens": 3,
    }
    return ServerContext(**{**values, **options})


@asynccontextmanager
async def open_client(fake: FakeEngine | None = None, **options: Any):
    """Serve a fake engine in this process and yield a client for it."""
    async with open_engine(fake or FakeEngine()) as engine:
        app = build_app(make_context(engine, **options))
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client


def failed(message: str, *, is_config_error: bool) -> FailedMessage:
    """Return the message of an engine that could not start."""
    return FailedMessage(message=message, is_config_error=is_config_error)

"""The offline API: an engine in this process, driven until the answers are complete.

from forerun import LLM, SamplingParams
llm = LLM()
print(llm.chat([{"role": "user", "content": "Hello"}])[0].choices[0].text)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forerun.config import DEFAULT_MODEL, EngineConfig
from forerun.core import (
    FinishReason,
    RequestOutput,
    SamplingParams,
    SpecRequestStats,
    TokenLogprobs,
)
from forerun.engine.admission import check_request
from forerun.engine.build import build_engine
from forerun.engine.messages import NewRequest, StepStats
from forerun.hidden_states import HiddenStateSink

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@dataclass(slots=True)
class Choice:
    """One finished answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    spec_stats: SpecRequestStats | None = None


@dataclass(slots=True)
class Completion:
    """All choices of one prompt, in order."""

    prompt_token_ids: list[int]
    choices: list[Choice]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    request_id: str = ""


class LLM:
    """A model and its engine in this process. Not thread-safe; one call at a time.

    Takes the options of `forerun serve` by name (`dtype`, `kv_cache_memory`, `max_num_seqs`,
    `speculative_config`, ...). A `hidden_state_sink` gets what every step computes. Raises
    ConfigError for what cannot be served.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        progress: Callable[[str, int, int], None] | None = None,
        hidden_state_sink: HiddenStateSink | None = None,
        **options: Any,
    ) -> None:
        config = EngineConfig.from_options(model=model, **options)
        self.engine, self.tokenizer, self.info = build_engine(
            config, progress=progress, sink=hidden_state_sink
        )
        self.step_stats: list[StepStats] = []  # of the last run
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete raw prompts (text or token ids), batched; one Completion per prompt.

        Raises RequestError if a prompt cannot be served or fails.
        """
        encoded = [self._encode(prompt) for prompt in _as_prompts(prompts)]
        return self._run(encoded, _as_params(params, len(encoded)))

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Answer one conversation (a list of messages) or several; as `generate` otherwise."""
        first = conversations[0] if conversations else None
        several = conversations if not isinstance(first, Mapping) else [conversations]
        encoded = [self.tokenizer.encode_chat(list(messages)) for messages in several]  # type: ignore[arg-type]
        return self._run(encoded, _as_params(params, len(encoded)))

    def stream(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Yield the outputs of one prompt or conversation as they come.

        Leaving the loop early aborts the request. Raises RequestError if it fails.
        """
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
            token_ids = self.tokenizer.encode_chat(list(prompt))  # type: ignore[arg-type]
        else:
            token_ids = self._encode(prompt)  # type: ignore[arg-type]
        params = params or SamplingParams()
        self._begin_run()
        request_id = self._submit(token_ids, params)
        remaining = params.n
        try:
            while remaining:
                for output in self._step():
                    if output.error is not None:
                        raise output.error
                    remaining -= output.finish_reason is not None
                    yield output
        finally:
            if remaining:
                self.engine.abort(request_id)
                self._step()

    def _encode(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _begin_run(self) -> None:
        """Start over with the statistics; outputs of two runs at once would get mixed up."""
        if self.engine.has_work:
            raise RuntimeError(
                "this LLM is still answering an earlier stream(); read it to its end or close() it "
                "before the next call."
            )
        self.step_stats.clear()

    def _submit(self, token_ids: list[int], params: SamplingParams) -> str:
        check_request(token_ids, params, self.engine.limits)
        request_id = f"offline-{next(self._ids)}"
        self.engine.add(
            NewRequest(request_id=request_id, prompt_token_ids=token_ids, params=params)
        )
        return request_id

    def _step(self) -> list[RequestOutput]:
        message = self.engine.step()
        self.step_stats.append(message.stats)
        return message.outputs

    def _run(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
    ) -> list[Completion]:
        for token_ids, wanted in zip(prompts, params, strict=True):
            check_request(token_ids, wanted, self.engine.limits)
        self._begin_run()
        completions: dict[str, Completion] = {}
        queue = list(zip(prompts, params, strict=True))[::-1]
        try:
            while queue or self.engine.has_work:
                # Feed the queue as it drains, so that any number of prompts may be given.
                while queue and self._has_room(queue[-1][1].n):
                    token_ids, wanted = queue.pop()
                    request_id = self._submit(token_ids, wanted)
                    choices = [Choice() for _ in range(wanted.n)]
                    completions[request_id] = Completion(token_ids, choices, request_id=request_id)
                for output in self._step():
                    _collect(completions[output.request_id], output)
        except BaseException:
            self.engine.abort_all()
            self._step()
            raise
        return list(completions.values())

    def _has_room(self, num_choices: int) -> bool:
        waiting = len(self.engine.scheduler.waiting)
        limit = self.engine.limits.max_waiting_requests
        return waiting == 0 or waiting + num_choices <= limit


def _collect(completion: Completion, output: RequestOutput) -> None:
    if output.error is not None:
        raise output.error
    choice = completion.choices[output.choice_index]
    choice.text += output.text
    choice.token_ids += output.token_ids
    if output.logprobs is not None:
        choice.logprobs = (choice.logprobs or []) + output.logprobs
    if output.prompt_logprobs is not None and output.choice_index == 0:
        completion.prompt_logprobs = (completion.prompt_logprobs or []) + output.prompt_logprobs
    if output.finish_reason is not None:
        choice.finish_reason = output.finish_reason
        choice.stop_reason = output.stop_reason
        choice.spec_stats = output.spec_stats
    if output.choice_index == 0:
        # Later choices share the blocks of the first; that is no hit the caller caused.
        completion.num_cached_tokens = output.num_cached_tokens


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise ValueError(f"got {len(params)} sampling params for {count} prompts.")
    return list(params)

"""Stand-ins for tests: a byte tokenizer, a runner that checks the cache instead of computing.

`PrefixCheckingRunner` stores in every KV slot the whole prefix that slot stands for, and before it
answers checks that each request's block table really spells the request's own prefix. Any mistake
in sharing, truncation, preemption or prefix matching shows up as a wrong prefix.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from forerun.budget import build_controller
from forerun.budget.costs.profile import CostProfile
from forerun.cache.manager import KVCacheManager
from forerun.core import RequestOutput, SamplingParams
from forerun.engine.engine import Engine
from forerun.engine.messages import EngineLimits, NewRequest
from forerun.engine.scheduler import Scheduler, SchedulerLimits
from forerun.plan import DraftRequest, RequestDraft, RequestResult, StepPlan, StepResult
from forerun.speculative_config import SpeculativeConfig

EOS = 256
VOCAB_SIZE = 257

NextToken = Callable[[Sequence[int]], int]
Draft = Callable[[Sequence[int], int], list[int]]


class ByteTokenizer:
    """Token ids are bytes; 256 is EOS. Implements what engine and server ask of a tokenizer."""

    eos_token_ids = frozenset({EOS})
    bos_token_id = None
    vocab_size = VOCAB_SIZE
    special_token_ids = frozenset({EOS})
    has_chat_template = True
    strips_first_space = False

    def __init__(self) -> None:
        self.generation_defaults: dict[str, float] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[dict], **_: object) -> list[int]:
        return self.encode("".join(f"{m['role']}: {m['content']}\n" for m in messages))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text = bytearray()
        for token_id in token_ids:
            if token_id < 256:
                text.append(token_id)
            elif not skip_special_tokens:
                text += b"<eos>"
        return text.decode(errors="replace")

    def id_to_token(self, token_id: int) -> str:
        return chr(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b"<eos>"


def count_up(prefix: Sequence[int]) -> int:
    """A target that depends on the whole prefix and never emits EOS."""
    return (sum(prefix) * 31 + len(prefix) * 7) % 250 + 1


def no_drafts(prefix: Sequence[int], depth: int) -> list[int]:
    """Draft nothing."""
    return []


def draft_right(next_token: NextToken, num_right: int = 10**6) -> Draft:
    """Draft what the target will say, up to `num_right` tokens, then a wrong one."""

    def draft(prefix: Sequence[int], depth: int) -> list[int]:
        tokens = list(prefix)
        for position in range(depth):
            right = next_token(tokens)
            tokens.append(right if position < num_right else (right + 1) % 250 + 1)
        return tokens[len(prefix) :]

    return draft


class PrefixCheckingRunner:
    """A Runner whose K/V are prefixes and whose target is a function of the prefix."""

    def __init__(
        self, next_token: NextToken, *, draft: Draft = no_drafts, kv_block_size: int = 4
    ) -> None:
        self.next_token = next_token
        self.draft_tokens = draft
        self.kv_block_size = kv_block_size
        self.slots: dict[int, tuple[int, ...]] = {}
        self.plans: list[list[tuple[str, int, int]]] = []
        self.released: list[str] = []
        self.fail_next = False

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(
            [(r.request_id, r.num_new_tokens, len(r.draft_token_ids)) for r in plan.requests]
        )
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("injected")
        # Write everything before reading anything, as a real forward does layer by layer.
        for request in plan.requests:
            self._write(request)
        return StepResult(results=[self._verify(request) for request in plan.requests])

    def draft(self, requests: Sequence[DraftRequest]) -> list[RequestDraft]:
        drafts = []
        for request in requests:
            tokens = self.draft_tokens(request.token_ids, request.depth)[: request.depth]
            drafts.append(RequestDraft(request_id=request.request_id, token_ids=tokens))
        return drafts

    def release(self, request_ids: Sequence[str]) -> None:
        self.released += request_ids

    def _slot(self, request, position: int) -> int:
        block = request.block_table[position // self.kv_block_size]
        assert block != 0, "the null block is never written"
        return block * self.kv_block_size + position % self.kv_block_size

    def _row_tokens(self, request) -> list[int]:
        end = request.num_computed_tokens + request.num_new_tokens
        return [*request.token_ids[:end], *request.draft_token_ids]

    def _write(self, request) -> None:
        tokens = self._row_tokens(request)
        for position in range(request.num_computed_tokens, len(tokens)):
            self.slots[self._slot(request, position)] = tuple(tokens[: position + 1])

    def _verify(self, request) -> RequestResult:
        tokens = self._row_tokens(request)
        for position in range(len(tokens)):
            stored = self.slots.get(self._slot(request, position))
            assert stored == tuple(tokens[: position + 1]), (
                f"{request.request_id} reads {stored} at position {position}"
            )
        result = RequestResult(request_id=request.request_id)
        if not request.samples:
            return result
        prefix = list(request.token_ids)
        for draft in [*request.draft_token_ids, None]:
            token = self.next_token(prefix)
            result.token_ids.append(token)
            prefix.append(token)
            if token != draft:
                break
            result.num_accepted_tokens += 1
        return result


def make_engine(
    runner: PrefixCheckingRunner | None = None,
    *,
    num_blocks: int = 257,
    max_num_seqs: int = 32,
    max_num_batched_tokens: int = 256,
    max_waiting_requests: int = 64,
    max_model_len: int = 512,
    max_prefill_while_decoding: int | None = None,
    num_speculative_tokens: int = 5,
    enable_prefix_caching: bool = True,
    num_lookahead_slots: int = 0,
    profile: CostProfile | None = None,
    now_s: Callable[[], float] = time.perf_counter,
    **speculative: object,
) -> Engine:
    """Build an engine over the real scheduler, cache and committer and a fake runner.

    `speculative` are further keys of SpeculativeConfig.
    """
    runner = runner or PrefixCheckingRunner(count_up)
    cache = KVCacheManager(
        num_blocks=num_blocks,
        kv_block_size=runner.kv_block_size,
        enable_prefix_caching=enable_prefix_caching,
    )
    limits = SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_prefill_while_decoding=max_prefill_while_decoding or max_num_batched_tokens,
        max_waiting_requests=max_waiting_requests,
        num_lookahead_slots=num_lookahead_slots,
    )
    config = SpeculativeConfig(num_speculative_tokens=num_speculative_tokens, **speculative)
    budget = build_controller(config, num_slots=max_num_seqs, profile=profile)
    return Engine(
        scheduler=Scheduler(limits, cache, budget),
        runner=runner,
        tokenizer=ByteTokenizer(),
        limits=EngineLimits(
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            num_kv_blocks=num_blocks - 1,
            kv_block_size=runner.kv_block_size,
            max_waiting_requests=max_waiting_requests,
        ),
        eos_token_ids=ByteTokenizer.eos_token_ids,
        now_s=now_s,
    )


def new_request(request_id: str, prompt: str | Sequence[int], **params: object) -> NewRequest:
    """Build a request over bytes or token ids."""
    token_ids = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
    return NewRequest(
        request_id=request_id, prompt_token_ids=token_ids, params=SamplingParams(**params)
    )


def drain(engine: Engine, *, max_steps: int = 10_000) -> list[RequestOutput]:
    """Step until idle, checking integrity after every step; return all outputs."""
    outputs = []
    for _ in range(max_steps):
        if not engine.has_work:
            return outputs
        outputs += engine.step().outputs
        engine.check_integrity()
    raise AssertionError("the engine did not become idle")


def collect_tokens(outputs: Sequence[RequestOutput]) -> dict[tuple[str, int], list[int]]:
    """Join the token deltas of each (request, choice)."""
    joined: dict[tuple[str, int], list[int]] = {}
    for output in outputs:
        joined.setdefault((output.request_id, output.choice_index), []).extend(output.token_ids)
    return joined


def continue_greedily(next_token: NextToken, prompt: Sequence[int], count: int) -> list[int]:
    """Return what a target says after a prompt, one token at a time."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]

"""The modes that are compared, and a window's forward through an engine's own runner.

Every arm is an `LLM`, so what is measured is what serves: its weights, kernels, attention and paged
pool. An arm that this model or machine cannot run says why, and the others go on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from forerun import LLM, SamplingParams
from forerun.engine.batch import build_batch
from forerun.engine.runner import ModelRunner
from forerun.plan import ScheduledRequest, StepPlan

_KV_CACHE_MEMORY = "768M"


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """A mode. `max_kl` bounds the mean KL, `max_ppl_change` the change of perplexity in percent.

    `needs_float` arms quantise at load: they start from the file's weights rounded to bfloat16.
    """

    name: str
    quantization: str = "exact"
    kv_cache_dtype: str = "auto"
    dtype: str = "bfloat16"
    needs_float: bool = False
    max_kl: float | None = None
    max_ppl_change: float | None = None


REFERENCE = Arm(name="fp32", dtype="float32")
EXACT = "exact"
_ARMS = (
    Arm(name=EXACT),
    Arm(name="int8", quantization="int8", max_kl=0.005, max_ppl_change=0.5),
    Arm(
        name="int8+kv8",
        quantization="int8",
        kv_cache_dtype="int8",
        max_kl=0.006,
        max_ppl_change=0.5,
    ),
    Arm(name="exact+kv8", kv_cache_dtype="int8"),
    Arm(name="q8_0", quantization="q8_0", needs_float=True),
)
ARMS = {arm.name: arm for arm in _ARMS}


def start_arm(arm: Arm, model: str, float_weights: Path | None = None) -> LLM:
    """Return the arm's engine; raises ConfigError if it cannot be had."""
    return LLM(
        str(float_weights) if arm.needs_float else model,
        dtype=arm.dtype,
        quantization=arm.quantization,
        kv_cache_dtype=arm.kv_cache_dtype,
        kv_cache_memory=_KV_CACHE_MEMORY,
        enable_prefix_caching=False,
        speculative_config={"method": "none"},
    )


class Forwarder:
    """Feeds windows to an idle engine's model, `rows_per_step` tokens at a time."""

    def __init__(self, llm: LLM, rows_per_step: int) -> None:
        assert isinstance(llm.engine._runner, ModelRunner)
        self._runner = llm.engine._runner
        self._kv_block_size = llm.engine.limits.kv_block_size
        self._rows_per_step = rows_per_step

    @torch.inference_mode()
    def forward(self, token_ids: list[int]) -> Tensor:
        """Return the final hidden states [num_tokens, hidden_size] of a window."""
        starts = range(0, len(token_ids), self._rows_per_step)
        # NOTE: copies, because the model may use the same memory in the next step.
        return torch.cat([self._run_step(token_ids, start).clone() for start in starts])

    @torch.inference_mode()
    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Return logits [num_rows, vocab_size] of some rows."""
        return self._runner._model.compute_logits(hidden_states)

    def _run_step(self, token_ids: list[int], start: int) -> Tensor:
        num_blocks = -(-len(token_ids) // self._kv_block_size)
        rows = ScheduledRequest(
            request_id="window",
            generation=0,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            num_computed_tokens=start,
            num_new_tokens=min(self._rows_per_step, len(token_ids) - start),
            draft_token_ids=(),
            # Nobody else is in the pool: any blocks but the null block will do.
            block_table=range(1, num_blocks + 1),
            params=SamplingParams(),
            seed=0,
            choice_index=0,
            num_draws=0,
        )
        plan = StepPlan(step=0, requests=[rows])
        batch = build_batch(plan, kv_block_size=self._kv_block_size)
        return self._runner._forward(batch, range(0)).hidden_states

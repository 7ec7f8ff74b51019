"""One step taken apart: linear layers, attention, head, sampling, and everything between.

Cases are (requests, rows per request, context): decoding, verification and prefill, forward pass
and argmax only. Native calls are timed where Python makes them; "between" is what Python and
PyTorch add to a step. A step's layers are one call: "linear" and "attention" come from a second run
with a call for each. The floor is the bytes a step must read (weights once, the K/V of the context)
over the read bandwidth measured in the same minute. Cases are interleaved. Last come whole engine
steps of 64 greedy requests: scheduling, text and sampling included. Medians, JSON last.

    python -m benchmarks.step_parts                        # bf16 on the default model
    python -m benchmarks.step_parts --quantization int8 --kv-cache-dtype int8
    python -m benchmarks.step_parts --cases 1x1@128,1x8@128 --repeats 50
    python -m benchmarks.step_parts --model qwen2.5-coder-0.5b-instruct --dtype float32
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from benchmarks.weight_bytes import count_weight_bytes
from torch import Tensor

from forerun import LLM, SamplingParams
from forerun.attention.base import AttentionBatch, AttentionContext
from forerun.cache.kv_store import KVStore, compute_block_bytes
from forerun.doctor.bandwidth import measure_read_bandwidth
from forerun.engine.messages import NewRequest
from forerun.kernels import find_kernels
from forerun.kernels.sampling_ops import find_largest
from forerun.models.decoder import DecoderModel

CASES = "1x1@128,1x8@128,8x1@128,32x1@256,64x1@128,32x1@1024,1x1@8192,1x512@0,1x512@3584"
TIMED = {"segment": "linear", "attention": "attention", "linear": "head", "unpack": "embedding"}
SAMPLING = (
    "argmax",
    "measure",
    "sample",
    "sample_listed",
    "draw",
    "draw_listed",
    "cut",
    "mask_tail",
)
ENGINE_REQUESTS = 64


@dataclass(frozen=True, slots=True)
class Case:
    """So many requests with so many rows each behind a context of so many positions."""

    num_reqs: int
    num_rows: int
    context: int

    @classmethod
    def parse(cls, text: str) -> Case:
        """Read REQUESTSxROWS@CONTEXT."""
        requests, _, rest = text.partition("x")
        rows, _, context = rest.partition("@")
        return cls(int(requests), int(rows), int(context))

    def build_batch(self, kv_block_size: int) -> AttentionBatch:
        """Lay the requests out one after the other."""
        total = self.context + self.num_rows
        width = -(-total // kv_block_size)
        tables = 1 + np.arange(self.num_reqs * width).reshape(self.num_reqs, width)
        block, offset = np.divmod(np.arange(self.context, total), kv_block_size)
        return AttentionBatch(
            query_start_loc=np.arange(self.num_reqs + 1) * self.num_rows,
            context_lens=np.full(self.num_reqs, self.context),
            block_tables=tables,
            slot_mapping=(tables[:, block] * kv_block_size + offset).ravel(),
        )


class Stopwatch:
    """Adds up the seconds spent in native calls, by part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def wrap(self, part: str, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return the function, timed."""

        def timed(params: Any) -> Any:
            started_s = time.perf_counter()
            result = function(params)
            self.seconds[part] += time.perf_counter() - started_s
            return result

        return timed


@torch.inference_mode()
def run_case(llm: LLM, case: Case, watch: Stopwatch) -> dict[str, float]:
    """Run one step and return milliseconds by part."""
    runner = llm.engine._runner
    model, store, backend = runner._model, runner._kv_store, runner._backend
    token_ids = torch.arange(case.num_reqs * case.num_rows) % 1000 + 100
    positions = torch.arange(case.context, case.context + case.num_rows).repeat(case.num_reqs)
    batch = case.build_batch(store.kv_block_size)

    def run_step() -> float:
        watch.seconds.clear()
        started_s = time.perf_counter()
        context = AttentionContext(
            backend=backend, kv_store=store, metadata=backend.prepare(batch, store)
        )
        hidden = model.forward(token_ids, positions, context).hidden_states
        find_largest(model.compute_logits(choose_rows(case, hidden)))
        return (time.perf_counter() - started_s) * 1e3

    whole = run_step()
    native = sum(watch.seconds.values()) * 1e3
    with mock.patch.object(model, "whole_step", None):
        run_step()
    parts = {part: watch.seconds[part] * 1e3 for part in TIMED.values()}
    return {"step": whole, "between": whole - native, **parts}


def run_engine(llm: LLM, watch: Stopwatch, repeats: int) -> dict[str, float]:
    """Decode greedily with the whole engine; return median milliseconds by part."""
    params = SamplingParams(temperature=0.0, max_tokens=repeats + 80, ignore_eos=True)
    for index in range(ENGINE_REQUESTS):
        prompt = [100 + index] + [(7 * index + 3 * i) % 40000 + 100 for i in range(127)]
        llm.engine.add(NewRequest(request_id=f"r{index}", prompt_token_ids=prompt, params=params))
    scheduler = llm.engine.scheduler
    while scheduler.waiting or any(request.gap > 1 for request in scheduler.running):
        llm.engine.step()
    samples = []
    for _ in range(repeats):
        watch.seconds.clear()
        started_s = time.perf_counter()
        llm.engine.step()
        whole = time.perf_counter() - started_s
        parts = {part: watch.seconds[part] for part in ("layers and head", "sampling")}
        samples.append({"step": whole, **parts, "between": whole - sum(parts.values())})
    llm.engine.abort_all()
    while llm.engine.has_work:
        llm.engine.step()
    return {part: statistics.median(s[part] for s in samples) * 1e3 for part in samples[0]}


def choose_rows(case: Case, hidden: Tensor) -> Tensor:
    """Return the rows that need logits: all when verifying, the last one of a long chunk."""
    return hidden if case.num_rows <= 16 else hidden[case.num_rows - 1 :: case.num_rows]


def count_bytes(model: DecoderModel, store: KVStore, case: Case) -> int:
    """Return the bytes a step must read: every linear weight and the context's K/V, as held."""
    size, dtype = store.kv_block_size, store.keys[0].dtype
    per_block = compute_block_bytes(store.layers, kv_block_size=size, dtype=dtype)
    tokens = case.num_reqs * (case.context + case.num_rows)
    return count_weight_bytes(model) + per_block * tokens // size


def main() -> None:
    """Run all cases in turn, several times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="model to load (default: the bundled one)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="exact", help="mode (default: %(default)s)")
    parser.add_argument("--kv-cache-dtype", default="auto", help="(default: %(default)s)")
    parser.add_argument("--cases", default=CASES, help="REQUESTSxROWS@CONTEXT, comma-separated")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    named = {} if args.model is None else {"model": args.model}
    llm = LLM(
        **named,
        dtype=args.dtype,
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
        speculative_config={"method": "none"},
    )
    watch, kernels = Stopwatch(), find_kernels()
    assert kernels is not None, "there are no native calls to time"
    model = llm.engine._runner._model
    for name, part in TIMED.items():
        setattr(kernels, name, watch.wrap(part, getattr(kernels, name)))
    kernels.forward = watch.wrap("layers and head", kernels.forward)
    for name in SAMPLING:
        setattr(kernels, name, watch.wrap("sampling", getattr(kernels, name)))
    cases = [Case.parse(text) for text in args.cases.split(",")]
    samples: dict[Case, list[dict[str, float]]] = {case: [] for case in cases}
    for repeat in range(args.repeats + 1):
        for case in cases:
            sample = run_case(llm, case, watch)
            if repeat > 0:
                samples[case].append(sample)
    bandwidth = measure_read_bandwidth()
    rows = []
    for case in cases:
        row = {key: statistics.median(s[key] for s in samples[case]) for key in samples[case][0]}
        row["floor"] = count_bytes(model, llm.engine._runner._kv_store, case) / bandwidth * 1e3
        rows.append({"case": f"{case.num_reqs}x{case.num_rows}@{case.context}", **row})
    rows.append({"case": f"engine {ENGINE_REQUESTS}", **run_engine(llm, watch, args.repeats)})
    for row in rows:
        print("  ".join(f"{k} {v:.2f}" if k != "case" else f"{v:>12}" for k, v in row.items()))
    facts = {"benchmark": "step_parts", "info": llm.info, "bandwidth": bandwidth}
    print(json.dumps({**facts, "rows": rows}))


if __name__ == "__main__":
    main()

"""What a block drafter costs beside the target's plain step, at one stream and more.

Two engines on the same weights decode the same number of requests, in turns of a few steps: one
without a drafter, whose steps have one row per request, and one that drafts a full block for every
request and verifies it. Taken from the second are the time of drafting, and that of ingesting the
taps of all verified rows; the share is that of both in the first one's step. Medians of all turns,
JSON last.

    python -m benchmarks.draft_cost --drafter '{"method": "dspark", "model": FOLDER}' --depth 5
    python -m benchmarks.draft_cost --drafter ... --dtype bfloat16 --quantization exact
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch

from forerun import LLM, SamplingParams
from forerun.data.prompt_sets import build_prompt_set
from forerun.engine.messages import NewRequest

STEPS_PER_TURN = 8
WARM_UP_STEPS = 24
MAX_TOKENS = 2000


class Arm:
    """An engine with some requests that never end, and the times of its steps."""

    def __init__(self, llm: LLM, num_requests: int) -> None:
        self._engine = llm.engine
        self.step_ms: list[float] = []
        self.draft_ms: list[float] = []
        rows = build_prompt_set("evaluation")[:num_requests]
        for number, row in enumerate(rows):
            params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
            tokens = llm.tokenizer.encode_chat(row["messages"])
            self._engine.add(
                NewRequest(request_id=f"r{number}", prompt_token_ids=tokens, params=params)
            )
        for _ in range(WARM_UP_STEPS):
            self._engine.step()

    def take_turn(self) -> None:
        """Run some steps and keep their times."""
        for _ in range(STEPS_PER_TURN):
            stats = self._engine.step().stats
            self.step_ms.append(stats.step_s * 1000)
            self.draft_ms.append(stats.draft_s * 1000)

    def stop(self) -> None:
        """End all requests."""
        self._engine.abort_all()
        self._engine.step()


def main() -> None:
    """Measure every number of streams and print tables, JSON last."""
    args = parse_arguments()
    drafter = {**args.drafter, "num_speculative_tokens": args.depth}
    options = {"dtype": args.dtype, "quantization": args.quantization}
    plain = LLM(args.model, speculative_config={"method": "none"}, **options)
    drafting = LLM(args.model, speculative_config=drafter, **options)
    ingests = watch_ingest(drafting)
    results = []
    for num_requests in args.streams:
        ingests.clear()
        arms = [Arm(llm, num_requests) for llm in (plain, drafting)]
        for turn in range(args.turns):
            for arm in arms if turn % 2 else arms[::-1]:
                arm.take_turn()
        step_ms = statistics.median(arms[0].step_ms)
        draft_ms = statistics.median(arms[1].draft_ms)
        per_row = statistics.median(ms / rows for ms, rows in ingests)
        ingest_ms = per_row * num_requests * (args.depth + 1)
        share = (draft_ms + ingest_ms) / step_ms
        results.append(
            {
                "streams": num_requests,
                "step_ms": step_ms,
                "draft_ms": draft_ms,
                "ingest_ms": ingest_ms,
                "share": share,
            }
        )
        print(
            f"{num_requests:3} streams: step {step_ms:.2f} ms, block of {args.depth} "
            f"{draft_ms:.2f} ms, ingest of all verified rows {ingest_ms:.2f} ms: {share:.0%}"
        )
        for arm in arms:
            arm.stop()
    keys = {key: str(value) for key, value in vars(args).items()}
    print(json.dumps({"benchmark": "draft_cost", "results": results, **keys}))


def parse_arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--drafter", type=json.loads, required=True, help="keys of the drafter")
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 32])
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="auto")
    return parser.parse_args()


def watch_ingest(llm: LLM) -> list[tuple[float, int]]:
    """Return a list that every later ingest adds its milliseconds and rows to."""
    drafter: Any = llm.engine._runner._drafter  # type: ignore[attr-defined]
    ingest, times = drafter.ingest, []

    def timed(aux: torch.Tensor, *args: Any) -> None:
        started_s = time.perf_counter()
        ingest(aux, *args)
        times.append(((time.perf_counter() - started_s) * 1000, len(aux)))

    drafter.ingest = timed
    return times


if __name__ == "__main__":
    main()

"""A long prompt arriving while others decode: its time to first token, and what they feel of it.

The engine decodes 32 requests; once they are steady a prompt of 1,024 tokens arrives. Its time to
first token is compared with the same prompt's on the idle engine, and the longest gaps between
tokens of the 32 (p99 over all their gaps while the prompt is computed) with their steady gap.
Repeated; medians and spread are printed, JSON last.

    python -m benchmarks.arrival
    python -m benchmarks.arrival --max-prefill-while-decoding 512 --repeats 3
    python -m benchmarks.arrival --quantization int8
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from forerun import LLM, SamplingParams
from forerun.engine.messages import NewRequest

NUM_STREAMS = 32
PROMPT_TOKENS = 1024
STEADY_STEPS = 20


def add(llm: LLM, name: str, num_tokens: int, max_tokens: int, salt: int) -> None:
    """Queue a greedy request whose prompt no other shares."""
    prompt = [(salt * 7919 + 31 * i) % 40000 + 100 for i in range(num_tokens)]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    llm.engine.add(NewRequest(request_id=name, prompt_token_ids=prompt, params=params))


def step_until_first(llm: LLM, name: str) -> tuple[float, list[float]]:
    """Return the seconds until the request's first token and those of every step until then."""
    started_s = last_s = time.perf_counter()
    gaps = []
    while True:
        message = llm.engine.step()
        now_s = time.perf_counter()
        gaps.append(now_s - last_s)
        last_s = now_s
        if any(out.request_id == name and out.token_ids for out in message.outputs):
            return now_s - started_s, gaps


def finish(llm: LLM) -> None:
    """Drop everything that runs."""
    llm.engine.abort_all()
    while llm.engine.has_work:
        llm.engine.step()


def run_once(llm: LLM, repeat: int) -> dict[str, float]:
    """Return one sample of all figures, in seconds."""
    add(llm, "idle", PROMPT_TOKENS, 1, salt=1000 + repeat)
    idle_s, _ = step_until_first(llm, "idle")
    finish(llm)
    for index in range(NUM_STREAMS):
        add(llm, f"s{index}", 128, 400, salt=NUM_STREAMS * repeat + index)
    while any(r.gap > 1 for r in llm.engine.scheduler.requests.values()):
        llm.engine.step()
    steady = []
    for _ in range(STEADY_STEPS):
        started_s = time.perf_counter()
        llm.engine.step()
        steady.append(time.perf_counter() - started_s)
    add(llm, "late", PROMPT_TOKENS, 1, salt=2000 + repeat)
    ttft_s, gaps = step_until_first(llm, "late")
    finish(llm)
    # Every stream gets one token a step: the gaps of all streams are those of the steps.
    return {
        "idle_ttft": idle_s,
        "ttft": ttft_s,
        "ttft_ratio": ttft_s / idle_s,
        "steady_gap": statistics.median(steady),
        "p99_gap": float(np.quantile(gaps, 0.99)),
        "gap_ratio": float(np.quantile(gaps, 0.99)) / statistics.median(steady),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="model to load (default: the bundled one)")
    parser.add_argument("--quantization", default="exact", help="mode (default: %(default)s)")
    parser.add_argument("--max-prefill-while-decoding", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    options = {} if args.model is None else {"model": args.model}
    llm = LLM(
        **options,
        dtype="bfloat16",
        quantization=args.quantization,
        max_prefill_while_decoding=args.max_prefill_while_decoding,
        enable_prefix_caching=False,
        speculative_config={"method": "none"},
    )
    run_once(llm, 0)
    samples = [run_once(llm, repeat) for repeat in range(1, args.repeats + 1)]
    figures = {}
    for name in samples[0]:
        values = sorted(sample[name] for sample in samples)
        figures[name] = {"median": statistics.median(values), "min": values[0], "max": values[-1]}
        print(f"{name:>12}: {figures[name]['median']:.3f} ({values[0]:.3f} - {values[-1]:.3f})")
    print(json.dumps({"benchmark": "arrival", "info": llm.info, "figures": figures}))


if __name__ == "__main__":
    main()

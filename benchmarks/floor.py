"""How close decoding of one stream comes to the bandwidth floor, measured side by side.

Some engine steps of one greedy request, then reads of a large array by all threads, and again: the
machine's bandwidth moves by half within minutes, so only neighbours may be compared. The floor is
the bytes of the weights, as the mode holds them, over the best of the reads beside the steps.
Prints the median share and its spread over the pairs, JSON last.

    python -m benchmarks.floor
    python -m benchmarks.floor --quantization int8
    python -m benchmarks.floor --model qwen2.5-coder-0.5b-instruct --pairs 10
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from benchmarks.weight_bytes import count_weight_bytes

from forerun import LLM, SamplingParams
from forerun.doctor.bandwidth import measure_read_bandwidth
from forerun.engine.messages import NewRequest

STEPS_PER_PAIR = 20
CONTEXT = 128


def main() -> None:
    """Measure pairs and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="model to load (default: the bundled one)")
    parser.add_argument("--quantization", default="exact", help="mode (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=30)
    args = parser.parse_args()
    options = {} if args.model is None else {"model": args.model}
    llm = LLM(
        **options,
        dtype="bfloat16",
        quantization=args.quantization,
        speculative_config={"method": "none"},
    )
    num_bytes = count_weight_bytes(llm.engine._runner._model)
    prompt = [(31 * i) % 40000 + 100 for i in range(CONTEXT)]
    params = SamplingParams(
        temperature=0.0, max_tokens=args.pairs * STEPS_PER_PAIR + 20, ignore_eos=True
    )
    llm.engine.add(NewRequest(request_id="r", prompt_token_ids=prompt, params=params))
    for _ in range(10):
        llm.engine.step()
    steps_ms, floors_ms = [], []
    for _ in range(args.pairs):
        times_s = []
        for _ in range(STEPS_PER_PAIR):
            started_s = time.perf_counter()
            llm.engine.step()
            times_s.append(time.perf_counter() - started_s)
        steps_ms.append(statistics.median(times_s) * 1e3)
        floors_ms.append(num_bytes / measure_read_bandwidth(budget_s=0.1) * 1e3)
    shares = sorted(floor / step for floor, step in zip(floors_ms, steps_ms, strict=True))
    figures = {
        "step_ms": statistics.median(steps_ms),
        "floor_ms": statistics.median(floors_ms),
        "share": statistics.median(shares),
        "share_p10_p90": [shares[len(shares) // 10], shares[len(shares) * 9 // 10]],
    }
    print(
        f"step {figures['step_ms']:.2f} ms, floor {figures['floor_ms']:.2f} ms, "
        f"share {100 * figures['share']:.0f} % "
        f"({100 * shares[len(shares) // 10]:.0f} - {100 * shares[len(shares) * 9 // 10]:.0f})"
    )
    facts = {"benchmark": "floor", "info": llm.info, "num_bytes": num_bytes}
    print(json.dumps({**facts, **figures}))


if __name__ == "__main__":
    main()

"""What a decode step costs over its F.linear calls alone, and how much of it is host time.

For each case the engine decodes with one row per request; between steps F.linear is run on its own
over plain copies of every linear layer's shape and the head's, so both numbers come from the same
moment of the same machine. (The engine itself holds weights as its mode does, prepacked if it can.)
Reports the median ratio and the spread; the last line is JSON.

    python -m benchmarks.step_cost                 # 1 and 32 requests at context 256, bf16
    python -m benchmarks.step_cost --repeats 3     # quick look
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch

from forerun import LLM, SamplingParams
from forerun.engine.messages import NewRequest


def copy_linears(llm: LLM, num_rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (rows, weight) of every linear layer and the head, as F.linear wants them."""
    model = llm.engine._runner._model
    linears = [linear for layer in model.layers for linear in layer.linears()]
    return [
        (
            torch.randn(num_rows, linear.in_features).bfloat16(),
            torch.randn(linear.out_features, linear.in_features).bfloat16(),
        )
        for linear in [*linears, model.head.table]
    ]


@torch.inference_mode()
def replay_linears(calls: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return the seconds F.linear takes for all of them, back to back."""
    started_s = time.perf_counter()
    for rows, weight in calls:
        torch.nn.functional.linear(rows, weight)
    return time.perf_counter() - started_s


def measure(llm: LLM, *, num_reqs: int, context: int, repeats: int) -> dict[str, Any]:
    """Decode `num_reqs` requests around `context` tokens and compare step by step."""
    params = SamplingParams(temperature=0.0, max_tokens=repeats + 80, ignore_eos=True)
    for index in range(num_reqs):
        # Different first tokens keep the prefix cache out of it.
        prompt = [100 + index] + [(7 * index + 3 * i) % 40000 + 100 for i in range(context - 1)]
        llm.engine.add(NewRequest(request_id=f"r{index}", prompt_token_ids=prompt, params=params))
    scheduler = llm.engine.scheduler
    while scheduler.waiting or any(request.gap > 1 for request in scheduler.running):
        llm.engine.step()
    calls = copy_linears(llm, num_reqs)
    replay_linears(calls)
    steps, hosts, linears = [], [], []
    for _ in range(repeats):
        stats = llm.engine.step().stats
        assert stats.num_rows == num_reqs, f"{stats.num_rows} rows in a step of {num_reqs}"
        steps.append(stats.step_s * 1e3)
        hosts.append(stats.host_s * 1e3)
        linears.append(replay_linears(calls) * 1e3)
    llm.engine.abort_all()
    while llm.engine.has_work:
        llm.engine.step()
    ratios = sorted(step / linear for step, linear in zip(steps, linears, strict=True))
    return {
        "num_reqs": num_reqs,
        "context": context,
        "step_ms": statistics.median(steps),
        "linear_ms": statistics.median(linears),
        "ratio": statistics.median(ratios),
        "ratio_p10_p90": [ratios[len(ratios) // 10], ratios[len(ratios) * 9 // 10]],
        "host_frac": statistics.median(h / s for h, s in zip(hosts, steps, strict=True)),
    }


def main() -> None:
    """Run the cases and print one line each, JSON last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="model to load (default: the bundled one)")
    parser.add_argument("--kv-block-size", type=int, default=None)
    parser.add_argument("--quantization", default="exact", help="mode (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=40)
    args = parser.parse_args()
    given = {"model": args.model, "kv_block_size": args.kv_block_size}
    options = {name: value for name, value in given.items() if value is not None}
    llm = LLM(
        **options,
        dtype="bfloat16",
        quantization=args.quantization,
        speculative_config={"method": "none"},
    )
    rows = []
    for num_reqs, context, bound in ((1, 256, 1.6), (32, 256, 1.5)):
        row = measure(llm, num_reqs=num_reqs, context=context, repeats=args.repeats)
        row["bound"] = bound
        rows.append(row)
        print(
            f"{num_reqs:3d} requests, context {context}: step {row['step_ms']:.1f} ms, "
            f"F.linear {row['linear_ms']:.1f} ms, ratio {row['ratio']:.2f} (bound {bound}), "
            f"host {100 * row['host_frac']:.1f} %"
        )
    print(json.dumps({"benchmark": "step_cost", "info": llm.info, "rows": rows}))


if __name__ == "__main__":
    main()

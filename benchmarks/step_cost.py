"""What a decode step costs over its own F.linear calls, and how much of it is host time.

For each case the engine decodes with one row per request; between steps the very F.linear calls
that a step makes are replayed on their own (same weights, same shapes), so both numbers come from
the same moment of the same machine. Reports the median ratio and the spread; the last line is JSON.

    python benchmarks/step_cost.py                 # 1 and 32 requests at context 256, bf16
    python benchmarks/step_cost.py --repeats 3     # quick look
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from forerun import LLM, SamplingParams
from forerun.engine.messages import NewRequest


class LinearRecorder(TorchFunctionMode):
    """Records the shapes of inputs and the weights of every F.linear call inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            self.calls.append((torch.empty_like(args[0]).normal_(), args[1]))
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def replay_linears(calls: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return the seconds all recorded calls take, back to back."""
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
    with LinearRecorder() as recorder:
        llm.engine.step()
    steps, hosts, linears = [], [], []
    for _ in range(repeats):
        stats = llm.engine.step().stats
        assert stats.num_rows == num_reqs, f"{stats.num_rows} rows in a step of {num_reqs}"
        steps.append(stats.step_s * 1e3)
        hosts.append(stats.host_s * 1e3)
        linears.append(replay_linears(recorder.calls) * 1e3)
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
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-block-size", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=40)
    args = parser.parse_args()
    given = {"model": args.model, "kv_block_size": args.kv_block_size}
    options = {name: value for name, value in given.items() if value is not None}
    llm = LLM(**options, dtype=args.dtype, speculative_config={"method": "none"})
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

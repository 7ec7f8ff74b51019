"""How well the cost model predicts step times, by load, after its online correction.

Natural prompts through the offline engine with adaptive n-gram drafts, so many in flight; the first
steps of each load are left out. Prints predicted / measured of single steps (median, 10th and 90th
percentile) and the calibration error of the confidences, JSON last.

    python -m benchmarks.cost_model
    python -m benchmarks.cost_model --model qwen2.5-coder-0.5b-instruct --loads 1,4,16
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np

from forerun import LLM, SamplingParams
from forerun.data.prompt_sets import build_prompt_set

NUM_CORRECTING_STEPS = 100
MAX_TOKENS = 256


def main() -> None:
    """Measure every load and print a line each, JSON last."""
    args = parse_arguments()
    prompts = [row["messages"] for row in build_prompt_set("evaluation")]
    results = []
    for load in args.loads:
        llm = LLM(args.model, max_num_seqs=load, quantization=args.quantization)
        llm.chat(
            prompts[: 4 * load][: len(prompts)],
            SamplingParams(temperature=0, max_tokens=MAX_TOKENS),
        )
        results.append({"load": load, **summarise(llm)})
        print(
            "load {load}: {num_steps} steps, predicted / measured {median:.3f} "
            "({p10:.3f} - {p90:.3f}), calibration error {ece:.3f}".format(**results[-1])
        )
    print(json.dumps(results))


def parse_arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument(
        "--loads", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 16, 64]
    )
    return parser.parse_args()


def summarise(llm: LLM) -> dict[str, Any]:
    """Return the ratios of the last run's steps."""
    steps = [s for s in llm.step_stats if s.num_rows][NUM_CORRECTING_STEPS:]
    ratios = np.array([s.predicted_step_s / s.step_s for s in steps])
    p10, median, p90 = np.percentile(ratios, [10, 50, 90])
    confidence = llm.engine.scheduler.budget.confidence
    assert confidence is not None, "the default policy is adaptive"
    return {
        "num_steps": len(steps),
        "median": float(median),
        "p10": float(p10),
        "p90": float(p90),
        "ece": confidence.stats.snapshot().ece or 0.0,
    }


if __name__ == "__main__":
    main()

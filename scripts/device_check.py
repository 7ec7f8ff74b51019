"""The one GPU check: parity with the CPU, losslessness, step times. Minutes; JSON last.

python scripts/device_check.py            # exits 0 with a note where there is no GPU
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

import torch

from forerun import LLM, SamplingParams
from forerun.engine.llm import Choice

PROMPTS = [
    "What is gravity?",
    "Repeat this sentence three times: the quick brown fox jumps over the lazy dog.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List the months of the year, then list them again in reverse order.",
]
TIE_MARGIN = 1e-3


def answer(device: str, dtype: str, method: str) -> list[Choice]:
    """Return greedy answers with the two best logprobs of every token."""
    llm = LLM(device=device, dtype=dtype, speculative_config={"method": method})
    params = SamplingParams(temperature=0.0, max_tokens=64, logprobs=2)
    conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    return [completion.choices[0] for completion in llm.chat(conversations, params)]


def compare(plain: list[Choice], other: list[Choice]) -> dict[str, Any]:
    """Compare token by token up to a tie; report the largest logprob difference on the way."""
    largest, ties, wrong = 0.0, 0, 0
    for a, b in zip(plain, other, strict=True):
        for token_a, token_b in zip(a.logprobs or [], b.logprobs or [], strict=False):
            if token_a.token_id != token_b.token_id:
                margin = token_a.top[0][1] - token_a.top[1][1]
                ties += margin < TIE_MARGIN
                wrong += margin >= TIE_MARGIN
                break
            largest = max(largest, abs(token_a.logprob - token_b.logprob))
    return {"max_logprob_difference": largest, "ties": ties, "wrong": wrong}


def time_steps(device: str, batch: int) -> dict[str, float]:
    """Return the median decode step of a batch in bf16, in milliseconds."""
    llm = LLM(device=device, dtype="bfloat16", speculative_config={"method": "none"})
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    llm.generate([[100 + index] * 128 for index in range(batch)], params)
    steps = [s for s in llm.step_stats if s.num_rows == batch]
    return {
        "batch": batch,
        "step_ms": 1e3 * statistics.median(s.step_s for s in steps),
        "host_ms": 1e3 * statistics.median(s.host_s for s in steps),
    }


def main() -> int:
    """Run all checks; the exit code is 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="device to check against the CPU")
    device = parser.parse_args().device
    if device.startswith("cuda") and not torch.cuda.is_available():
        print("no GPU here: nothing to check")
        print(json.dumps({"check": "device", "device": None}))
        return 0
    # NOTE: TF32 would hide a real difference behind its own.
    torch.backends.cuda.matmul.allow_tf32 = False
    on_cpu = answer("cpu", "float32", "none")
    on_device = answer(device, "float32", "none")
    speculating = answer(device, "float32", "ngram")
    report = {
        "check": "device",
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else device,
        "parity_with_cpu": compare(on_cpu, on_device),
        "speculation_on_device": compare(on_device, speculating),
        "steps": [time_steps(device, batch) for batch in (1, 32, 128)],
    }
    passed = report["parity_with_cpu"]["wrong"] == report["speculation_on_device"]["wrong"] == 0
    print("passed" if passed else "FAILED")
    print(json.dumps(report))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())

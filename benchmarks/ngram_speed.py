"""n-gram speculation against none on copy-heavy prompts: tokens per second, same process pairs.

Two engines on the same weights take turns on the same prompts (order rotated), so noise hits both.
Outputs must agree token for token in float32 and in int8. Prints the median ratio; the last line is
JSON.

    python -m benchmarks.ngram_speed
    python -m benchmarks.ngram_speed --dtype bfloat16 --quantization int8
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from forerun import LLM, SamplingParams
from forerun.engine.llm import Choice

PASSAGE = (
    "The harbour master keeps a ledger of every vessel that enters the bay. Each line holds the "
    "name of the ship, its home port, the cargo it carries and the hour at which it dropped "
    "anchor. On the twelfth of March the schooner Adelaide arrived from Lisbon with forty barrels "
    "of olive oil, and the brig Northern Star arrived from Bergen with dried cod and timber."
)
PROMPTS = [
    f"Repeat the following text exactly, word for word, and nothing else:\n\n{PASSAGE}",
    "Copy this Python function exactly, changing nothing:\n\ndef area(width, height):\n"
    '    """Return the area of a rectangle."""\n    if width < 0 or height < 0:\n'
    '        raise ValueError("sides must not be negative")\n    return width * height\n',
    "Write out the list below three times:\n- apples\n- pears\n- plums\n- cherries\n- apricots\n",
]


def run(llm: LLM, params: SamplingParams) -> tuple[float, list[Choice]]:
    """Answer all prompts one after the other; return (tokens per second, answers)."""
    started_s = time.perf_counter()
    choices = []
    for prompt in PROMPTS:
        (completion,) = llm.chat([{"role": "user", "content": prompt}], params)
        choices.append(completion.choices[0])
    num_tokens = sum(len(choice.token_ids) for choice in choices)
    return num_tokens / (time.perf_counter() - started_s), choices


def compute_acceptance_length(choices: list[Choice]) -> float:
    """Return tokens emitted per verification step, bonus and recovered tokens included."""
    stats = [choice.spec_stats for choice in choices if choice.spec_stats]
    steps = sum(s.num_spec_steps for s in stats)
    return 1 + sum(s.num_accepted_tokens for s in stats) / max(1, steps)


def main() -> None:
    """Run both arms in turn and report the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quantization", default="exact", help="mode (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    arms: dict[str, Any] = {"none": {"method": "none"}, "ngram": {"method": "ngram"}}
    # Without prefix hits every repeat does the same work.
    engines = {
        name: LLM(
            dtype=args.dtype,
            quantization=args.quantization,
            enable_prefix_caching=False,
            speculative_config=config,
        )
        for name, config in arms.items()
    }
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    answers: dict[str, list[Choice]] = {}
    for repeat in range(args.repeats + 1):
        order = list(arms) if repeat % 2 else list(arms)[::-1]
        for name in order:
            speed, answers[name] = run(engines[name], params)
            if repeat:  # the first round warms up
                speeds[name].append(speed)
    ratios = [b / a for a, b in zip(speeds["none"], speeds["ngram"], strict=True)]
    token_ids = {name: [choice.token_ids for choice in answers[name]] for name in arms}
    result = {
        "benchmark": "ngram_speed",
        "tokens_per_s": {name: statistics.median(values) for name, values in speeds.items()},
        "ratio": statistics.median(ratios),
        "ratio_min_max": [min(ratios), max(ratios)],
        "same_tokens": token_ids["none"] == token_ids["ngram"],
        "acceptance_length": compute_acceptance_length(answers["ngram"]),
        "dtype": args.dtype,
        "quantization": args.quantization,
    }
    print(f"ngram / none: {result['ratio']:.2f}x, spread {result['ratio_min_max']}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()

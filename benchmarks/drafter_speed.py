"""A drafter against no speculation at one stream: tokens per second, pairs in the same process.

Two engines on the same weights take turns on the same prompts (order rotated), so noise hits both.
Prompts are copy-heavy ones, where n-gram drafts shine, or a few of each kind of the evaluation set,
with natural stops. Greedy tokens must agree in float32 and in int8; in bfloat16 ties may fall
differently, and what share of the answers is equal is printed. The last line is JSON.

    python -m benchmarks.drafter_speed --prompts copy --dtype float32 --quantization exact
    python -m benchmarks.drafter_speed --drafter '{"method": "dspark", "model": FOLDER}' --depth 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from benchmarks.progress import show_progress

from forerun import LLM, SamplingParams
from forerun.data.prompt_sets import build_prompt_set
from forerun.engine.llm import Choice

PASSAGE = (
    "The harbour master keeps a ledger of every vessel that enters the bay. Each line holds the "
    "name of the ship, its home port, the cargo it carries and the hour at which it dropped "
    "anchor. On the twelfth of March the schooner Adelaide arrived from Lisbon with forty barrels "
    "of olive oil, and the brig Northern Star arrived from Bergen with dried cod and timber."
)
COPY_PROMPTS = [
    f"Repeat the following text exactly, word for word, and nothing else:\n\n{PASSAGE}",
    "Copy this Python function exactly, changing nothing:\n\ndef area(width, height):\n"
    '    """Return the area of a rectangle."""\n    if width < 0 or height < 0:\n'
    '        raise ValueError("sides must not be negative")\n    return width * height\n',
    "Write out the list below three times:\n- apples\n- pears\n- plums\n- cherries\n- apricots\n",
]
NUM_EACH = 3
Messages = list[dict[str, Any]]


def choose_prompts(kind: str) -> list[Messages]:
    """Return conversations of a kind: copy or natural."""
    if kind == "copy":
        return [[{"role": "user", "content": prompt}] for prompt in COPY_PROMPTS]
    chosen: dict[str, list[Messages]] = {}
    for row in build_prompt_set("evaluation"):
        chosen.setdefault(row["category"], []).append(row["messages"])
    return [messages for rows in chosen.values() for messages in rows[:NUM_EACH]]


def run(llm: LLM, prompts: list[Messages], params: SamplingParams) -> tuple[float, list[Choice]]:
    """Answer all prompts one after the other; return (tokens per second, answers)."""
    started_s = time.perf_counter()
    choices = [llm.chat(messages, params)[0].choices[0] for messages in prompts]
    num_tokens = sum(len(choice.token_ids) for choice in choices)
    return num_tokens / (time.perf_counter() - started_s), choices


def compute_acceptance_length(choices: list[Choice]) -> float:
    """Return tokens emitted per verification step, bonus and recovered tokens included."""
    stats = [choice.spec_stats for choice in choices if choice.spec_stats]
    steps = sum(s.num_spec_steps for s in stats)
    return 1 + sum(s.num_accepted_tokens for s in stats) / max(1, steps)


def main() -> None:
    """Run both arms in turn and report the ratio."""
    args = parse_arguments()
    keys = {**args.drafter, "num_speculative_tokens": args.depth}
    if not args.fixed:
        keys["enable_adaptive_verification"] = True
    arms: dict[str, Any] = {"none": {"method": "none"}, "drafter": keys}
    # Without prefix hits every repeat does the same work.
    engines = {
        name: LLM(
            args.model,
            dtype=args.dtype,
            quantization=args.quantization,
            enable_prefix_caching=False,
            speculative_config=config,
        )
        for name, config in arms.items()
    }
    prompts = choose_prompts(args.prompts)
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    answers: dict[str, list[Choice]] = {}
    with show_progress(2 * (args.repeats + 1)) as progress:
        for repeat in range(args.repeats + 1):
            for name in list(arms) if repeat % 2 else list(arms)[::-1]:
                speed, answers[name] = run(engines[name], prompts, params)
                if repeat:  # the first round warms up
                    speeds[name].append(speed)
                progress.advance()
    report(args, speeds, answers)


def parse_arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--drafter", type=json.loads, default={"method": "ngram"})
    parser.add_argument("--depth", type=int, default=7)
    parser.add_argument("--fixed", action="store_true", help="verify every draft")
    parser.add_argument("--prompts", choices=("copy", "natural"), default="natural")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=128)
    return parser.parse_args()


def report(
    args: argparse.Namespace, speeds: dict[str, list[float]], answers: dict[str, list[Choice]]
) -> None:
    """Print the ratio for people, then everything as JSON."""
    ratios = [b / a for a, b in zip(speeds["none"], speeds["drafter"], strict=True)]
    pairs = zip(answers["none"], answers["drafter"], strict=True)
    same = [a.token_ids == b.token_ids for a, b in pairs]
    result = {
        "benchmark": "drafter_speed",
        "tokens_per_s": {name: statistics.median(values) for name, values in speeds.items()},
        "ratio": statistics.median(ratios),
        "ratio_min_max": [min(ratios), max(ratios)],
        "same_answers": sum(same) / len(same),
        "acceptance_length": compute_acceptance_length(answers["drafter"]),
        **{key: str(value) for key, value in vars(args).items()},
    }
    print(f"drafter / none: {result['ratio']:.2f}x, spread {result['ratio_min_max']}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()

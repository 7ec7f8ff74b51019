"""How true the online estimator's confidences are on real n-gram drafts.

Prompts are answered by the model with every draft verified, and each draft is written down: its
evidence, and how many tokens were accepted. Then the estimator is served those drafts in the order
they came (predict, then observe), everything verified or trimmed by its own prediction, in the
batches they came in or one request after the other; since all outcomes are known, it is judged on
what it never saw too. ECE in ten equal-mass bins after the first 2,000 drafts, for the evaluation
prompts mixed and for code followed by chat. JSON last.

    python -m benchmarks.estimator
    python -m benchmarks.estimator --concurrency 4 --max-tokens 256
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun import LLM, SamplingParams
from forerun.budget.confidence.calibration import compute_auroc, compute_ece
from forerun.budget.confidence.estimator import AcceptanceEstimator, EstimatorPrior
from forerun.data.prompt_sets import build_prompt_set
from forerun.plan import DraftRequest, RequestDraft, StepPlan, StepResult

NUM_POSITIONS = 7
NUM_UNJUDGED = 2000
# A request's recent acceptance fades by this factor a draft.
RECENT_DECAY = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One draft that was verified in full."""

    request_id: str
    evidence: list[float]
    num_accepted: int


class Recorder:
    """A runner that writes down what another one drafts and verifies."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._evidence: dict[str, list[float]] = {}
        self.steps: list[list[Record]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def draft(self, requests: Sequence[DraftRequest]) -> list[RequestDraft]:
        """Draft, and keep the evidence until the outcome is known."""
        drafts = self._runner.draft(requests)
        self._evidence |= {draft.request_id: draft.evidence for draft in drafts}
        return drafts

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the step and record its drafts."""
        result = self._runner.execute(plan)
        records = [
            Record(
                request_id=request.request_id,
                evidence=self._evidence[request.request_id][: len(request.draft_token_ids)],
                num_accepted=outcome.num_accepted_tokens,
            )
            for request, outcome in zip(plan.requests, result.results, strict=True)
            if request.draft_token_ids
        ]
        if records:
            self.steps.append(records)
        return result


class RecentAcceptance:
    """Log-odds of each request's own recent acceptance."""

    def __init__(self) -> None:
        self._counts: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))

    def get(self, records: Sequence[Record]) -> np.ndarray:
        """Return the hits [R]; 0 for a request that has none yet."""
        counts = np.stack([self._counts[record.request_id] for record in records])
        return np.log((counts[:, 0] + 0.5) / (counts[:, 1] + 0.5)).astype(np.float32)

    def add(self, records: Sequence[Record], num_verified: np.ndarray) -> None:
        """Count the accepted and the rejected drafts that were seen."""
        for record, verified in zip(records, num_verified, strict=True):
            accepted = min(record.num_accepted, verified)
            seen = np.array([accepted, float(accepted < verified)])
            self._counts[record.request_id] = RECENT_DECAY * self._counts[record.request_id] + seen


def replay(steps: list[list[Record]], min_survival: float) -> dict[str, float]:
    """Serve the drafts to a new estimator; return how it did after the first ones."""
    estimator = AcceptanceEstimator(NUM_POSITIONS, EstimatorPrior.HEADLESS)
    recent = RecentAcceptance()
    parts: list[tuple[np.ndarray, ...]] = []
    num_served = 0
    for records in steps:
        lengths = np.array([len(record.evidence) for record in records])
        num_accepted = np.array([record.num_accepted for record in records])
        drafted = np.arange(NUM_POSITIONS) < lengths[:, None]
        evidence = np.full(drafted.shape, np.nan, dtype=np.float32)
        evidence[drafted] = np.concatenate([record.evidence for record in records])
        hits, verifiers = recent.get(records), np.zeros(len(records), dtype=np.int8)
        confidence = estimator.predict(evidence, hits, verifiers)
        survival = np.cumprod(confidence, axis=1)
        accepted = np.arange(NUM_POSITIONS) < num_accepted[:, None]
        if num_served >= NUM_UNJUDGED:
            reached = drafted & (np.arange(NUM_POSITIONS) <= num_accepted[:, None])
            judged = (confidence[reached], accepted[reached], survival[drafted], accepted[drafted])
            parts.append(judged)
        kept = np.maximum((drafted & (survival > min_survival)).sum(axis=1), 1)
        estimator.observe(evidence, hits, verifiers, kept, np.minimum(num_accepted, kept))
        recent.add(records, kept)
        num_served += len(records)
    confidence, accepted, survival, survived = map(np.concatenate, zip(*parts, strict=True))
    return {
        "drafts_judged": num_served - NUM_UNJUDGED,
        "acceptance": float(accepted.mean()),
        "ece_confidence": compute_ece(confidence, accepted),
        "ece_survival": compute_ece(survival, survived),
        "auroc_confidence": compute_auroc(confidence, accepted),
    }


def answer(llm: LLM, categories: Sequence[str], max_tokens: int) -> None:
    """Answer all evaluation prompts of these categories, in shuffled order."""
    prompts = [row for row in build_prompt_set("evaluation") if row["category"] in categories]
    random.Random(0).shuffle(prompts)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    llm.chat([row["messages"] for row in prompts], params)


def main() -> None:
    """Record, replay, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=512)
    args = parser.parse_args()
    workloads = {
        "mixed": [("chat", "code", "math", "summarise")],
        "code_then_chat": [("code",), ("chat",)],
    }
    llm = LLM(
        max_num_seqs=args.concurrency,
        speculative_config={"method": "ngram", "num_speculative_tokens": NUM_POSITIONS},
    )
    runner = llm.engine._runner
    results: dict[str, dict[str, float]] = {}
    for name, parts in workloads.items():
        recorder = llm.engine._runner = Recorder(runner)
        for categories in parts:
            answer(llm, categories, args.max_tokens)
        one_by_one = defaultdict(list)
        for record in (record for step in recorder.steps for record in step):
            one_by_one[record.request_id].append([record])
        orders = {
            "batched": recorder.steps,
            "one_by_one": [step for steps in one_by_one.values() for step in steps],
        }
        for order, steps in orders.items():
            for min_survival in (0.0, 0.2):
                key = f"{name}/{order}/min_survival={min_survival}"
                results[key] = replay(steps, min_survival)
                print(key, {k: round(v, 4) for k, v in results[key].items()}, flush=True)
    print(json.dumps({"benchmark": "estimator", "results": results, **vars(args)}))


if __name__ == "__main__":
    main()

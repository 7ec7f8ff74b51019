"""transformers with static batches: a plain greedy loop over its own forward and dynamic cache.

`generate` does more between two forwards, so the loop is the kinder measure. There is no server:
natural prompts are answered in batches as large as the load, left-padded, each batch running until
its last answer ends. Attention is SDPA, its default.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import transformers
from benchmarks.peers.workers.lines import StepClock, claim_stdout, serve_lines


class TransformersWorker:
    """One model; answers one generation or one set of natural prompts at a time."""

    def __init__(self, model: str) -> None:
        auto_model: Any = transformers.AutoModelForCausalLM
        self._model = auto_model.from_pretrained(model, dtype=torch.bfloat16).eval()
        self._eos_ids = torch.tensor(self._model.generation_config.eos_token_id).view(-1)
        self.facts = {"version": transformers.__version__, "num_threads": torch.get_num_threads()}

    @torch.inference_mode()
    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Generate for equal prompts and tell the steps, or answer natural prompts in batches."""
        if "num_streams" in request:
            return self._answer_batches(**request)
        prompts, max_tokens = request["prompts"], request["max_tokens"]
        clock = StepClock(len(prompts), max_tokens)
        token_ids, cache = torch.tensor(prompts), None
        for _ in range(max_tokens):
            output = self._model(token_ids, past_key_values=cache, logits_to_keep=1)
            token_ids, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
            for stream in range(len(prompts)):
                clock.add(stream, 1)
            clock.tick()
        return {"steps": clock.steps}

    def _answer_batches(
        self, prompts: list[list[int]], num_streams: int, max_tokens: int
    ) -> dict[str, Any]:
        started_s = time.perf_counter()
        starts = range(0, len(prompts), num_streams)
        num_tokens = sum(
            self._answer_batch(prompts[start : start + num_streams], max_tokens) for start in starts
        )
        return {"num_tokens": num_tokens, "elapsed_s": time.perf_counter() - started_s}

    def _answer_batch(self, prompts: list[list[int]], max_tokens: int) -> int:
        """Return how many tokens the answers have, the end token counted."""
        length = max(map(len, prompts))
        token_ids = torch.tensor([[0] * (length - len(ids)) + ids for ids in prompts])
        mask = torch.tensor([[0] * (length - len(ids)) + [1] * len(ids) for ids in prompts])
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache, num_tokens = None, 0
        is_open = torch.ones(len(prompts), dtype=torch.bool)
        for _ in range(max_tokens):
            output = self._model(
                token_ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                logits_to_keep=1,
            )
            num_tokens += int(is_open.sum())
            token_ids, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
            is_open &= ~torch.isin(token_ids[:, 0], self._eos_ids)
            if not is_open.any():
                break
            mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], 1)
            positions = positions[:, -1:] + 1
        return num_tokens


def main() -> None:
    """Load the model and answer until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    args = parser.parse_args()
    answers = claim_stdout()
    worker = TransformersWorker(args.model)
    serve_lines(worker.facts, worker.answer, answers)


if __name__ == "__main__":
    main()

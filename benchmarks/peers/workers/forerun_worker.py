"""Forerun's engine without speculation, stepped by hand, in a process of its own.

Defaults but for what the comparison fixes: bf16, the quantised mode, no drafter, no prefix cache,
the context length.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.peers.workers.lines import StepClock, claim_stdout, serve_lines

import forerun
from forerun import LLM, SamplingParams
from forerun.engine.messages import NewRequest

_PROMPT_ROWS = 512


class ForerunWorker:
    """One engine; answers one generation at a time."""

    def __init__(self, model: str, max_model_len: int, quantization: str) -> None:
        llm = LLM(
            model,
            dtype="bfloat16",
            quantization=quantization,
            max_model_len=max_model_len,
            enable_prefix_caching=False,
            # All prompts at once, or the first streams end before the last ones begin.
            max_prefill_while_decoding=_PROMPT_ROWS,
            speculative_config={"method": "none"},
        )
        self._engine = llm.engine
        self.facts = {"version": forerun.__version__, "info": llm.info}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Generate `max_tokens` for each prompt and tell the steps."""
        prompts, max_tokens = request["prompts"], request["max_tokens"]
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        clock = StepClock(len(prompts), max_tokens)
        for index, prompt in enumerate(prompts):
            new = NewRequest(request_id=str(index), prompt_token_ids=prompt, params=params)
            self._engine.add(new)
        while self._engine.has_work:
            for output in self._engine.step().outputs:
                if output.error is not None:
                    raise output.error
                clock.add(int(output.request_id), len(output.token_ids))
            clock.tick()
        return {"steps": clock.steps}


def main() -> None:
    """Load the model and answer until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("max_model_len", type=int)
    parser.add_argument("quantization")
    args = parser.parse_args()
    answers = claim_stdout()
    worker = ForerunWorker(args.model, args.max_model_len, args.quantization)
    serve_lines(worker.facts, worker.answer, answers)


if __name__ == "__main__":
    main()

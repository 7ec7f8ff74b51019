"""vLLM's own engine, stepped by hand, in vLLM's environment (this process has no forerun).

Defaults of vLLM but for what the comparison fixes: bf16, no prefix cache (prompts come again in
every block), and the context length. Its engine core runs in a process of its own, as it ships.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.peers.workers.lines import StepClock, claim_stdout, serve_lines


class VllmWorker:
    """One engine; answers one generation at a time."""

    def __init__(self, model: str, max_model_len: int) -> None:
        import vllm  # type: ignore[import-not-found,unused-ignore]
        from vllm.sampling_params import (  # type: ignore[import-not-found,unused-ignore]
            RequestOutputKind,
        )

        self._vllm = vllm
        self._delta = RequestOutputKind.DELTA
        self._engine = vllm.LLM(
            model=model,
            dtype="bfloat16",
            max_model_len=max_model_len,
            enable_prefix_caching=False,
        ).llm_engine
        self.facts = {"version": vllm.__version__}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Generate `max_tokens` for each prompt and tell the steps."""
        prompts, max_tokens = request["prompts"], request["max_tokens"]
        params = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, output_kind=self._delta
        )
        clock = StepClock(len(prompts), max_tokens)
        for index, prompt in enumerate(prompts):
            self._engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                clock.add(int(output.request_id), len(output.outputs[0].token_ids))
            clock.tick()
        return {"steps": clock.steps}


def main() -> None:
    """Load the model and answer until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("max_model_len", type=int)
    args = parser.parse_args()
    answers = claim_stdout()
    worker = VllmWorker(args.model, args.max_model_len)
    serve_lines(worker.facts, worker.answer, answers)


if __name__ == "__main__":
    main()

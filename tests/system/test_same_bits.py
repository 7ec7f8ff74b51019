"""What the rest of the batch does to a request's logits: nothing, or ties.

With native kernels every sum has a fixed order, so logits and text are the same bits at any batch
size, with drafts or without, greedy or seeded, with the weights as stored (int8) or dequantised.
In PyTorch alone the shape of a batch moves logits in bfloat16 a little, and every divergence must
be a tie within that. The noise is measured in the same run: over all positions that a batch-1 and a
batch-32 run share, the p99.9 of the absolute logit difference. Wherever batching or speculation
changes a greedy token, the gap between the two tokens in the batch-1 logits must be within twice
that.
"""

from __future__ import annotations

import pytest
import torch

from forerun import LLM, SamplingParams, kernels
from forerun.data import build_prompt_set
from forerun.kernels import explain_kernels, find_kernels

NUM_TOKENS = 24
MODES = ({"quantization": "exact"}, {"quantization": "int8"})


def load_conversations() -> list[list[dict]]:
    conversations = [entry["messages"] for entry in build_prompt_set("small")]
    briefly = [
        [*c[:-1], {"role": "user", "content": c[-1]["content"] + " Answer briefly."}]
        for c in conversations[:8]
    ]
    return conversations + briefly


class LogitsRecorder:
    """Keeps the first logits row of every verified request, by its committed tokens."""

    def __init__(self, llm: LLM) -> None:
        self.rows: dict[tuple[int, ...], torch.Tensor] = {}
        verifier = llm.engine._runner._verifier
        verify = verifier.verify

        def record(logits, requests, draft_probs):
            row = 0
            for request in requests:
                self.rows[tuple(request.token_ids)] = logits[row].clone()
                row += 1 + len(request.draft_token_ids)
            return verify(logits, requests, draft_probs)

        verifier.verify = record


def run(
    method: str, batch: int, temperature: float = 0.0, **options: object
) -> tuple[list[list[int]], list[list[int]], LogitsRecorder]:
    """Return (prompts, answers, logits) of one arm."""
    llm = LLM(
        dtype="bfloat16", max_num_seqs=batch, speculative_config={"method": method}, **options
    )
    recorder = LogitsRecorder(llm)
    params = SamplingParams(temperature=temperature, max_tokens=NUM_TOKENS, seed=5)
    completions = llm.chat(load_conversations(), params)
    prompts = [c.prompt_token_ids for c in completions]
    return prompts, [c.choices[0].token_ids for c in completions], recorder


@pytest.mark.network
@pytest.mark.skipif(find_kernels() is None, reason=explain_kernels())
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(mode.values()))
def test_with_kernels_logits_and_text_are_the_same_bits_at_any_load(
    mode: dict[str, str], temperature: float
) -> None:
    _, alone, plain = run("none", 1, temperature, **mode)
    for method in ("none", "ngram"):
        _, answers, recorder = run(method, 32, temperature, **mode)
        assert answers == alone
        shared = plain.rows.keys() & recorder.rows.keys()
        assert len(shared) > 100
        assert all(torch.equal(plain.rows[key], recorder.rows[key]) for key in shared)


@pytest.mark.network
def test_without_kernels_every_divergence_is_a_tie_within_the_batch_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "_probe", lambda: (None, "switched off"))
    prompts, alone, plain = run("none", 1)
    arms = {"batch 32": run("none", 32), "batch 32, ngram": run("ngram", 32)}
    shared = plain.rows.keys() & arms["batch 32"][2].rows.keys()
    differences = torch.cat(
        [(plain.rows[key] - arms["batch 32"][2].rows[key]).abs() for key in shared]
    )
    noise = float(differences.kthvalue(int(0.999 * len(differences))).values)
    assert len(shared) > 100
    assert 0 < noise < 1.0, "batch shape should matter in bfloat16, but little"
    for name, (_, answers, _) in arms.items():
        divergences = 0
        for prompt, expected, got in zip(prompts, alone, answers, strict=True):
            if expected == got:
                continue
            at = next(
                i for i, pair in enumerate(zip(expected, got, strict=False)) if len({*pair}) > 1
            )
            row = plain.rows[tuple(prompt + expected[:at])]
            gap = float(row[expected[at]] - row[got[at]])
            assert gap <= 2 * noise, f"{name}: gap {gap:.4f} at {at}, noise {noise:.4f}"
            divergences += 1
        print(f"{name}: {divergences} divergences, p99.9 noise {noise:.4f}")

"""Greedy text of real models in float32 against recorded transformers output.

greedy_reference.json holds prompts and tokens. All are expected to match to the end: the smallest
recorded top-1/top-2 margin is 0.0048, far above float32 noise. Only a margin under 1e-3, where
another summation order may choose differently, would end the comparison.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.data.bundled import fetch_bundled_model, fetch_default_model
from forerun.models.loader import load_model
from tiny_models import PagedRunner, generate_greedy

MARGIN = 1e-3
REFERENCE = json.loads((Path(__file__).parents[1] / "greedy_reference.json").read_text())["models"]


def check_model(path: Path, entries: list[dict[str, Any]]) -> None:
    model = load_model(path, dtype=torch.float32)
    for entry in entries:
        expected = entry["new_ids"]
        runner = PagedRunner(model, num_blocks=40, kv_block_size=16)
        new_ids, margins = generate_greedy(runner, entry["prompt_ids"], len(expected))
        close = [step for step, margin in enumerate(margins) if margin < MARGIN]
        compared = close[0] if close else len(expected)
        assert new_ids[:compared] == expected[:compared], entry["prompt"]
        if "first_logits_top5" in entry:
            check_first_logits(model, entry)


def check_first_logits(model: Any, entry: dict[str, Any]) -> None:
    runner = PagedRunner(model, num_blocks=40, kv_block_size=16)
    prompt = entry["prompt_ids"]
    (logits,), _ = runner.step([(runner.add(prompt), len(prompt))])
    for token_id, expected in entry["first_logits_top5"]:
        assert float(logits[-1, token_id]) == pytest.approx(expected, abs=1e-3)


@pytest.mark.network
def test_smollm2() -> None:
    check_model(fetch_default_model(), REFERENCE["smollm2"])


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "key"), [("gemma3-270m", "gemma3"), ("qwen2.5-coder-0.5b-instruct", "qwen05")]
)
def test_bigger_models(name: str, key: str) -> None:
    check_model(fetch_bundled_model(name), REFERENCE[key])

"""The drafter that travels with Forerun: found unasked, lossless, accepted, calibrated, small."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from forerun import LLM
from forerun.config import DEFAULT_MODEL, EngineConfig
from forerun.data import build_prompt_set
from forerun.evaluation.metrics import measure
from forerun.evaluation.run import RolloutSettings, roll_out_all, verify_everything
from forerun.shipped_drafters import find_shipped_drafter, find_shipped_folder
from forerun.speculative_config import SpeculativeConfig
from system.losslessness import answer, list_ties

pytestmark = pytest.mark.network

MAX_BYTES = 25_000_000
FIXED = {
    "method": "dspark",
    "model": "smollm2-135m-instruct-dspark",
    "num_speculative_tokens": 5,
}


def get_default(**options: object) -> SpeculativeConfig:
    return EngineConfig.from_options(**options).speculative


def make_llm(*, speculates: bool, **options: object) -> LLM:
    """Return the default model without speculation, or with the default one at full depth."""
    speculative = verify_everything(get_default()) if speculates else {"method": "none"}
    return LLM(dtype="float32", speculative_config=speculative, **options)


def test_default_model_drafts_with_it_unasked() -> None:
    shipped = find_shipped_drafter(DEFAULT_MODEL)
    assert shipped is not None
    speculative = get_default()
    assert (speculative.method, speculative.model) == ("dspark", shipped.name)
    assert speculative.num_speculative_tokens == shipped.num_speculative_tokens
    assert speculative.enable_adaptive_verification
    assert speculative.prompt_lookup


def test_it_is_small_and_says_what_it_is() -> None:
    shipped = find_shipped_drafter(DEFAULT_MODEL)
    assert shipped is not None
    folder = find_shipped_folder(shipped.name)
    assert folder is not None
    assert (folder / "model.safetensors").stat().st_size <= MAX_BYTES
    card = (folder / "README.md").read_text()
    assert "apache-2.0" in card
    temperatures = json.loads((folder / "confidence_temperatures.json").read_text())
    for verifier in ("greedy", "standard", "coupled"):
        assert len(temperatures[verifier]) == shipped.num_speculative_tokens


def test_generate_shows_its_acceptance() -> None:
    command = [sys.executable, "-m", "forerun", "generate", "List the months of the year."]
    command += ["--temperature", "0", "--max-tokens", "64", "--stats"]
    # By name, and not adaptive: what a busy machine finds worth its time is not for a test.
    command += ["--speculative-config", json.dumps(FIXED)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    shown = re.search(r"accepted (\d+) of (\d+) drafted, acceptance length", done.stderr)
    assert shown, done.stderr
    assert 0 < int(shown[1]) < int(shown[2])


@pytest.mark.parametrize("quantization", ["int8", "exact"])
def test_greedy_tokens_equal_those_without_it(quantization: str) -> None:
    prompts = [row["messages"] for row in build_prompt_set("small")]
    plain = answer(make_llm(speculates=False, quantization=quantization), prompts, 32)
    drafting = make_llm(speculates=True, quantization=quantization)
    drafted = answer(drafting, prompts, 32)
    print("ties:", list_ties(plain, drafted))
    assert sum(choice.spec_stats.num_accepted_tokens for choice in drafted) > 200
    drafting.engine.check_integrity()


@pytest.mark.slow
def test_greedy_tokens_equal_those_without_it_on_200_prompts() -> None:
    prompts = [row["messages"] for row in build_prompt_set("evaluation")]
    assert len(prompts) == 200
    arms = (make_llm(speculates=on, quantization="exact") for on in (False, True))
    plain, drafted = (answer(llm, prompts, 64) for llm in arms)
    print("ties:", list_ties(plain, drafted))


def test_drafts_of_test_prompts_are_accepted_as_often_as_they_claim() -> None:
    """Bounds with room: what it reaches is in its model card."""
    rows = [row for row in build_prompt_set("acceptance") if row["category"] == "code"][:24]
    options = {"speculative_config": get_default()}
    settings = RolloutSettings(verifiers=("greedy",), max_tokens=96)
    found = measure(roll_out_all(options, rows, settings)["greedy"])
    assert found.num_drafts > 500
    assert found.acceptance_length > 2.0
    first = found.positions[0]
    assert abs(first.predicted - first.survival) < 0.08
    assert np.all(np.diff([place.survival for place in found.positions]) < 0)

"""The whole way on the real default model: answers, training, calibration, a drafter that helps.

The smoke recipe is far too short for a good drafter; it must beat one that was not trained.
"""

from __future__ import annotations

import json
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.cli import main
from forerun.data.prompt_sets import build_prompt_set
from forerun.drafters.dspark.checkpoint import load_network, save_checkpoint

NUM_DRAFTS = 3
QUESTIONS = [row["messages"] for row in build_prompt_set("small")]


def describe(folder: Path, **keys: Any) -> dict[str, Any]:
    own = {"method": "dspark", "model": str(folder), "num_speculative_tokens": NUM_DRAFTS}
    return own | keys


def run(*args: str) -> None:
    assert main(list(args)) == 0, args


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with answers, a drafter trained on them, and an untrained one."""
    folder = tmp_path_factory.mktemp("smoke")
    prompts = str(resources.files("forerun.data") / "small.jsonl")
    answers, drafter = str(folder / "answers"), str(folder / "drafter")
    generate = ("train", "generate", "--prompts", prompts, "--output", answers)
    run(*generate, "--max-tokens", "64", "--temperatures", "0")
    run("train", "run", "--data", answers, "--output", drafter, "--recipe", "smoke")
    shutil.copytree(drafter, folder / "untrained")
    network = load_network(folder / "untrained")
    torch.manual_seed(0)
    for weight in network.parameters():
        if weight.dim() > 1 and weight.isfinite().all():
            torch.nn.init.normal_(weight, std=0.02)
    network.shares_target = True
    save_checkpoint(folder / "untrained", network)
    return folder


def measure(capsys: pytest.CaptureFixture[str], drafter: Path) -> dict[str, Any]:
    """Return the figures of greedy answers to the prompts trained on."""
    config = json.dumps(describe(drafter))
    capsys.readouterr()
    flags = ("--prompts", "small", "--max-tokens", "64", "--verifiers", "greedy", "--json")
    run("evaluate", "--speculative-config", config, *flags)
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)["figures"]["greedy"]["all"]
    return figures


def test_a_trained_drafter_beats_an_untrained_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = measure(capsys, folder / "drafter")
    untrained = measure(capsys, folder / "untrained")
    assert trained["num_drafts"] > 200
    assert untrained["acceptance_length"] < 1.05
    assert trained["acceptance_length"] > untrained["acceptance_length"] + 0.1


def test_calibration_writes_what_serving_finds(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.dumps(describe(folder / "drafter"))
    flags = ("--prompts", "small", "--max-tokens", "64", "--verifiers", "greedy")
    run("calibrate", "--speculative-config", config, *flags)
    content = json.loads((folder / "drafter" / "confidence_temperatures.json").read_text())
    assert len(content["greedy"]) == content["num_positions"] == NUM_DRAFTS
    assert content["num_samples"] > 100
    assert "expected calibration error" in capsys.readouterr().out


def test_text_is_the_targets_own_and_drafts_are_accepted(folder: Path) -> None:
    """In the int8 mode bits do not depend on what else is in a step: equal tokens, no ties."""
    params = SamplingParams(max_tokens=48, temperature=0.0)
    plain = LLM(speculative_config={"method": "none"}).chat(QUESTIONS, params)
    adaptive = describe(folder / "drafter", enable_adaptive_verification=True)
    llm = LLM(speculative_config=adaptive)
    drafted = llm.chat(QUESTIONS, params)
    assert [c.choices[0].token_ids for c in drafted] == [c.choices[0].token_ids for c in plain]
    assert llm.info["speculative"]["policy"] == "adaptive"
    assert sum(step.num_draft_tokens for step in llm.step_stats) > 0

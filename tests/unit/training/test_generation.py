"""Answers of the real default model with what it computed: right rows, resumable, bounded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.config import DEFAULT_MODEL
from forerun.data.bundled import resolve_model_path
from forerun.data.prompt_sets import build_prompt_set
from forerun.errors import ConfigError
from forerun.training.answers.generation import Generation, GenerationProgress, GenerationSettings
from forerun.training.answers.recorder import HiddenStateRecorder
from forerun.training.answers.shards import Shard, TargetSequence, find_shards
from forerun.training.answers.target import load_head, spread_taps
from forerun.training.objective.products import multiply_shifted, widen

MAX_TOKENS = 24
PROMPTS = build_prompt_set("small")[:6]


def ignore(_: GenerationProgress) -> None:
    """Take progress nobody wants."""


def make_settings(folder: Path, **changes: Any) -> GenerationSettings:
    options = {"max_tokens": MAX_TOKENS, "shard_prompts": 3, "concurrency": 4}
    return GenerationSettings(model=DEFAULT_MODEL, output=folder, **(options | changes))


def generate(folder: Path, rows: Sequence[Any], **changes: Any) -> list[TargetSequence]:
    Generation(make_settings(folder, **changes), rows, ignore).run()
    shards = [Shard(path) for path in find_shards(folder)]
    return [shard.read(index) for shard in shards for index in range(len(shard))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("answers")


@pytest.fixture(scope="module")
def sequences(folder: Path) -> list[TargetSequence]:
    return generate(folder, PROMPTS)


def test_every_prompt_is_answered_in_order(sequences: list[TargetSequence]) -> None:
    assert [s.prompt_id for s in sequences] == [row["id"] for row in PROMPTS]
    assert {s.temperature for s in sequences} == {0.0, 0.8}
    for sequence in sequences:
        length, answer = len(sequence.token_ids), len(sequence.token_ids) - sequence.prompt_len
        assert sequence.features.shape == (length - 1, 5 * 576)
        assert sequence.hidden.shape == (answer, 576)


def test_rows_are_those_of_the_finished_text(sequences: list[TargetSequence]) -> None:
    """Computed token by token in a batch, or all at once as a prompt: the same bits (int8)."""
    recorder = HiddenStateRecorder(spread_taps(30))
    llm = LLM(
        DEFAULT_MODEL,
        hidden_state_sink=recorder,
        speculative_config={"method": "none"},
        enable_prefix_caching=False,
    )
    for sequence in sequences[:3]:
        tokens = sequence.token_ids.tolist()
        (completion,) = llm.generate([tokens], SamplingParams(max_tokens=1))
        features, hidden = recorder.collect(
            f"{completion.request_id}#0", len(tokens) + 1, sequence.prompt_len
        )
        assert torch.equal(features[:-1], sequence.features)
        assert torch.equal(hidden[:-1], sequence.hidden)


def test_hidden_rows_and_normalisers_give_the_tokens_probabilities(
    sequences: list[TargetSequence],
) -> None:
    head = load_head(resolve_model_path(DEFAULT_MODEL))
    hits = []
    for sequence in sequences:
        log_chances = multiply_shifted(sequence.hidden, widen(head), sequence.target_lse).float()
        totals = log_chances.exp().sum(-1)
        torch.testing.assert_close(totals, torch.ones(len(totals)), rtol=0, atol=5e-3)
        if sequence.temperature == 0.0:
            answer = sequence.token_ids[sequence.prompt_len :]
            hits += (log_chances.argmax(-1) == answer).tolist()
    # The engine multiplies 8-bit activations, this does not: near ties fall differently.
    assert sum(hits) / len(hits) > 0.9


def test_an_interrupted_run_goes_on_with_the_same_answers(
    tmp_path: Path, sequences: list[TargetSequence]
) -> None:
    generate(tmp_path, PROMPTS[:3])
    written = find_shards(tmp_path)[0].stat().st_mtime_ns
    found = generate(tmp_path, PROMPTS)
    assert find_shards(tmp_path)[0].stat().st_mtime_ns == written
    assert [s.token_ids.tolist() for s in found] == [s.token_ids.tolist() for s in sequences]


def test_answers_of_two_targets_never_mix(folder: Path, sequences: list[TargetSequence]) -> None:
    with pytest.raises(ConfigError, match="give another --output"):
        Generation(make_settings(folder, target_layer_ids=(1, 2)), PROMPTS, ignore)


def test_too_little_space_is_told_beforehand(tmp_path: Path) -> None:
    generation = Generation(make_settings(tmp_path), PROMPTS, ignore)
    assert 0 < generation.needed_bytes < 10e6
    with pytest.raises(ConfigError, match="--num-prompts"):
        generation.check_disk(limit=1000)
    generation.check_disk(limit=None)


@pytest.mark.parametrize("layers", [(3, 1), (1, 1), (29,), (-2, 4), ()])
def test_layers_a_target_does_not_have_are_refused(tmp_path: Path, layers: Any) -> None:
    with pytest.raises(ConfigError, match="ascending layers of -1"):
        Generation(make_settings(tmp_path, target_layer_ids=layers), PROMPTS, ignore)

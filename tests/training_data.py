"""A tiny target on disk and data it could have made: tokens that follow a fixed permutation.

The next token is a function of the last one, and the target says so with a probability near 0.95,
so a drafter can learn all there is to learn from the anchor.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from forerun.training.answers.shards import (
    Manifest,
    TargetSequence,
    name_shard,
    write_manifest,
    write_shard,
)
from forerun.training.answers.target import compute_lse
from forerun.training.settings import TrainSettings
from tiny_models import save_hf_model

NUM_LAYERS = 4
TAPS = (-1, 1)
TOKENS = range(10, 34)
_CERTAINTY = 8.0


def make_target(folder: Path, **overrides: object) -> Path:
    """Save a random model of four layers."""
    save_hf_model(folder, "llama", num_hidden_layers=NUM_LAYERS, **overrides)
    return folder


def load_head(target: Path) -> Tensor:
    """Return the target's head [V, d] in bfloat16, as training loads it."""
    return load_file(target / "model.safetensors")["lm_head.weight"].bfloat16()


def follow(token_id: int) -> int:
    """Return the token after a token."""
    return TOKENS[(7 * (token_id - TOKENS[0]) + 5) % len(TOKENS)]


def make_sequence(head: Tensor, number: int, *, prompt_len: int = 3) -> TargetSequence:
    """Return a sequence that starts at a token of its number's choice."""
    tokens = [TOKENS[number % len(TOKENS)]]
    while len(tokens) < 14 + number % 5:
        tokens.append(follow(tokens[-1]))
    token_ids = torch.tensor(tokens)
    answer = token_ids[prompt_len:]
    rows = head[answer].float()
    hidden = (_CERTAINTY * rows / rows.square().sum(-1, keepdim=True)).bfloat16()
    table = torch.randn(
        len(head), len(TAPS) * head.shape[1], generator=torch.Generator().manual_seed(5)
    )
    return TargetSequence(
        prompt_id=f"prompt-{number}",
        temperature=1.0,
        token_ids=token_ids,
        prompt_len=prompt_len,
        features=table[token_ids[:-1]].bfloat16(),
        hidden=hidden,
        target_lse=compute_lse(hidden, head, answer),
    )


def write_data(folder: Path, target: Path, *, num_sequences: int = 48, per_shard: int = 16) -> Path:
    """Write a data folder of this target."""
    head = load_head(target)
    vocab_size, hidden_size = head.shape
    manifest = Manifest(
        model=str(target),
        quantization="exact",
        target_layer_ids=TAPS,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
    )
    write_manifest(folder, manifest)
    sequences = [make_sequence(head, number) for number in range(num_sequences)]
    for shard, first in enumerate(range(0, num_sequences, per_shard)):
        write_shard(name_shard(folder, shard), sequences[first : first + per_shard])
    return folder


def make_settings(**changes: object) -> TrainSettings:
    """Return settings that train in moments."""
    fields: dict[str, object] = {
        "num_layers": 1,
        "block_size": 4,
        "draft_vocab_size": 40,
        "markov_rank": 8,
        "steps": 12,
        "anchors_per_sequence": 6,
        "heldout_frac": 0.2,
        "heldout_sequences": 6,
        "averaging": 0.5,
        "device": "cpu",
    }
    return TrainSettings(**(fields | changes))

"""TrainSettings: everything `forerun train run` can be told, and the recipes that name some of it.

No torch here. What shapes the network must stay the same when a run is resumed; the rest may
change, which is how a run is prolonged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from forerun.errors import ConfigError, describe_unknown_key
from forerun.options import check_choice, check_frac, check_positive, check_type, option

INITIALISATIONS = ("random", "target")
_SHORTEST_BLOCK = 3
HEAD_TYPES = ("vanilla", "gated", "rnn")
# A network built of other ones of these is another network.
STRUCTURAL = (
    "num_layers",
    "block_size",
    "draft_vocab_size",
    "mask_token_id",
    "markov_rank",
    "markov_head_type",
    "confidence_head",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings:
    """The network, the schedule and the loss of one training run."""

    num_layers: int = option(2, "layers of the drafter")
    block_size: int = option(7, "drafts one block gives")
    min_block_size: int | None = option(
        None,
        "shortest block to train on; every step draws a length from here to block_size (default: "
        "3, or block_size if that is less)",
    )
    draft_vocab_size: int = option(
        8192, "tokens that can be drafted: the most frequent in the data"
    )
    mask_token_id: int | None = option(
        None, "token of the open slots (default: the first that no answer contains)"
    )
    markov_rank: int = option(64, "rank of the sequential head; 0 for none")
    markov_head_type: str = option("vanilla", "vanilla, gated or rnn")
    confidence_head: bool = option(True, "train a confidence head")
    init: str = option("random", "weights to start from: random, or target (its last layers)")
    steps: int = option(20000, "optimiser steps of the whole schedule")
    sequences_per_step: int = option(2, "answers per step and process")
    anchors_per_sequence: int = option(40, "full blocks per answer; more of shorter ones")
    learning_rate: float = option(2e-3, "highest learning rate")
    warmup_frac: float = option(0.04, "share of the steps over which the rate rises")
    final_rate_frac: float = option(0.02, "what is left of the rate at the end of its cosine")
    weight_decay: float = option(0.0, "AdamW's weight decay")
    beta2: float = option(0.99, "AdamW's second beta")
    clip_norm: float = option(1.0, "longest gradient")
    averaging: float = option(
        0.999, "decay of the weight average that is evaluated and exported; 0 for none"
    )
    loss_decay: float = option(4.0, "a position's weight in the loss is exp(-position / this)")
    soft_weight: float = option(1.0, "weight of soft cross-entropy in the first phase")
    l1_weight: float = option(0.9, "weight of the L1 distance in the second phase")
    hard_weight: float = option(0.1, "weight of cross-entropy with the token itself")
    confidence_weight: float = option(1.0, "weight of the confidence head's loss")
    tv_from: float = option(0.5, "share of the steps after which L1 takes over")
    tv_ramp: float = option(0.05, "share of the steps over which it does")
    heldout_frac: float = option(0.02, "share of the prompts kept for evaluation")
    heldout_sequences: int = option(64, "answers per evaluation")
    evaluate_minutes: float = option(10.0, "minutes between evaluations")
    checkpoint_minutes: float = option(5.0, "minutes between checkpoints")
    max_minutes: float | None = option(None, "stop after so long, to be resumed")
    loss_memory_mb: int = option(4, "largest float32 tensor over the vocabulary")
    shuffle_shards: int = option(4, "shards whose answers are mixed; they should fit into memory")
    num_threads: int | None = option(None, "CPU threads")
    device: str = option("auto", "torch device: auto, cpu, cuda")
    seed: int = option(42, "of weights, order and anchors")

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):
            check_type(field.name, getattr(self, field.name), hints[field.name])
        for name in _POSITIVE:
            check_positive(name, getattr(self, name))
        for name in _FRACTIONS:
            check_frac(name, getattr(self, name))
        for name in _ABOVE_ZERO:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be above 0, got {value}.")
        for name in _NOT_NEGATIVE:
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be 0 or more, got {getattr(self, name)}.")
        check_choice("init", self.init, INITIALISATIONS)
        check_choice("markov_head_type", self.markov_head_type, HEAD_TYPES)
        if self.shortest_block > self.block_size:
            raise ConfigError(
                f"min_block_size ({self.min_block_size}) must be at most block_size "
                f"({self.block_size})."
            )
        if self.averaging == 1 or self.beta2 == 1 or self.heldout_frac == 1:
            raise ConfigError("averaging, beta2 and heldout_frac must be below 1.")

    @property
    def shortest_block(self) -> int:
        """Length of the shortest blocks trained on."""
        return self.min_block_size or min(_SHORTEST_BLOCK, self.block_size)

    @classmethod
    def from_recipe(cls, recipe: str, options: Mapping[str, Any]) -> TrainSettings:
        """Return a recipe's settings with the given options on top."""
        if recipe not in RECIPES:
            raise ConfigError(describe_unknown_key(recipe, RECIPES, kind="recipe"))
        return cls(**{**RECIPES[recipe], **options})


_POSITIVE = (
    "num_layers",
    "block_size",
    "min_block_size",
    "draft_vocab_size",
    "steps",
    "sequences_per_step",
    "anchors_per_sequence",
    "heldout_sequences",
    "loss_memory_mb",
    "shuffle_shards",
    "num_threads",
)
_FRACTIONS = (
    "warmup_frac",
    "final_rate_frac",
    "averaging",
    "beta2",
    "tv_from",
    "tv_ramp",
    "heldout_frac",
)
_ABOVE_ZERO = (
    "learning_rate",
    "clip_norm",
    "loss_decay",
    "evaluate_minutes",
    "checkpoint_minutes",
    "max_minutes",
)
_NOT_NEGATIVE = (
    "markov_rank",
    "weight_decay",
    "soft_weight",
    "l1_weight",
    "hard_weight",
    "confidence_weight",
    "seed",
)

RECIPES: dict[str, dict[str, Any]] = {
    "dspark": {},
    # The backbone alone, for comparison: no sequential and no confidence head.
    "dflash": {"markov_rank": 0, "confidence_head": False},
    # A minute or two on two cores: enough to beat an untrained drafter.
    "smoke": {
        "num_layers": 1,
        "block_size": 3,
        "draft_vocab_size": 2048,
        "anchors_per_sequence": 30,
        "steps": 150,
        "warmup_frac": 0.1,
        "averaging": 0.95,
        "tv_from": 1.0,
        "heldout_sequences": 16,
        "max_minutes": 2.0,
    },
}

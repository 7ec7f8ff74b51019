"""Put a trained, calibrated and evaluated drafter where Forerun finds it: weights and model card.

    python scripts/ship_drafter.py FOLDER --evaluation evaluation.json

FOLDER is the output of `forerun train run` with the temperatures of `forerun calibrate` beside it,
the evaluation that of `forerun evaluate --output`. The head's rows are left out: they are the
target's, and the file may take 25 MB at most.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from forerun.budget.confidence.calibration import TEMPERATURES_FILE
from forerun.config import DEFAULT_MODEL
from forerun.drafters.dspark.checkpoint import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    load_network,
    save_checkpoint,
)
from forerun.errors import ConfigError
from forerun.shipped_drafters import SHIPPED_FOLDER, SHIPPED_FOR_TARGET

MAX_BYTES = 25_000_000
DATA_SETS = {"chat": "MT-Bench", "code": "HumanEval", "math": "GSM8K", "all": "all"}
CARD = Path(__file__).parent / "model_card.md"
# Settings of the recipe that differ from the defaults of `forerun train run`.
RECIPE = ("init", "block_size", "min_block_size", "anchors_per_sequence", "steps")


def main() -> int:
    """Read the arguments, write the folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("drafter", type=Path, help="trained and calibrated drafter")
    parser.add_argument("--evaluation", type=Path, required=True, help="figures of evaluate")
    parser.add_argument("--target", default=DEFAULT_MODEL, help="bundled name of its target")
    args = parser.parse_args()
    shipped = SHIPPED_FOR_TARGET.get(args.target)
    if shipped is None:
        parser.error(f"--target: no drafter ships for {args.target}")
    try:
        path = ship(args.drafter, SHIPPED_FOLDER / shipped.name, args.evaluation, args.target)
    except (ConfigError, OSError, KeyError) as error:
        parser.error(f"{args.drafter} cannot be shipped: {error}")
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB")
    return 0


def ship(drafter: Path, out: Path, evaluation: Path, target: str) -> Path:
    """Write checkpoint, temperatures and model card; returns the weights' path."""
    temperatures = (drafter / TEMPERATURES_FILE).read_text()
    values = json.loads((drafter / CONFIG_FILE).read_text())
    training = {"forerun_training": values["forerun_training"]}
    network = load_network(drafter)
    card = write_card(network.config, training["forerun_training"], evaluation, target)
    save_checkpoint(out, network, extra=training, includes_head=False)
    (out / TEMPERATURES_FILE).write_text(temperatures)
    (out / "README.md").write_text(card)
    weights = out / WEIGHTS_FILE
    if weights.stat().st_size > MAX_BYTES:
        shutil.rmtree(out)
        raise ConfigError(f"its weights take more than {MAX_BYTES / 1e6:.0f} MB.")
    return weights


def write_card(config: Any, training: dict[str, Any], evaluation: Path, target: str) -> str:
    """Return the model card."""
    found, settings = json.loads(evaluation.read_text()), training["settings"]
    figures, heldout = found["figures"], training["heldout"]
    flags = (f"--{name.replace('_', '-')} {settings[name]}" for name in RECIPE)
    return CARD.read_text().format(
        target=target,
        num_taps=len(config.target_layer_ids),
        num_layers=config.num_layers,
        draft_vocab_size=config.draft_vocab_size,
        markov_rank=config.markov_rank,
        block_size=config.block_size,
        lengths=format_lengths(figures),
        calibration=format_calibration(figures["greedy"]["all"]["positions"]),
        num_drafts=figures["greedy"]["all"]["num_drafts"],
        steps=training["steps"],
        hours=training["train_s"] / 3600,
        heldout_length=heldout["acceptance_length"],
        heldout_acceptance=" ".join(f"{x:.2f}" for x in heldout["acceptance"]),
        options=" ".join(flags),
        **{key: found[key] for key in ("prompts", "num_prompts", "max_tokens", "temperature")},
    )


def format_lengths(figures: dict[str, Any]) -> str:
    """Return a table of acceptance lengths and conditional acceptance."""
    rows = ["| verifier | prompts | drafts | length | conditional acceptance by position |"]
    rows.append("|---|---|---|---|---|")
    for verifier, sets in figures.items():
        for name, one in sets.items():
            chances = " ".join(f"{place['conditional']:.3f}" for place in one["positions"])
            length, drafts = one["acceptance_length"], one["num_drafts"]
            shown = DATA_SETS.get(name, name)
            rows.append(f"| {verifier} | {shown} | {drafts} | {length:.2f} | {chances} |")
    return "\n".join(rows)


def format_calibration(positions: list[dict[str, Any]]) -> str:
    """Return a table of predicted and measured survival."""
    rows = ["| position | survival | predicted | ECE | AUROC |", "|---|---|---|---|---|"]
    for number, place in enumerate(positions, 1):
        rows.append(
            f"| {number} | {place['survival']:.3f} | {place['predicted']:.3f} "
            f"| {place['ece'] * 100:.1f} % | {place['auroc']:.3f} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())

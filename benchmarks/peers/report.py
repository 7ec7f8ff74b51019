"""One model's report: the bf16 rows against the best peer, their floor, notes, and the JSON. Pure.

The best peer is chosen anew in every block, so noise helps the peers: a ratio is Forerun over the
highest of the others in the same block. A peer without a value keeps its column and shows why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.peers.figures import (
    compare_blocks,
    compare_with_floor,
    find_values,
    format_best,
    format_bound,
    format_floor,
    format_peer,
    format_ratio,
    format_shares,
    judge,
    summarise_peers,
    summarise_ratios,
)
from benchmarks.peers.quantised import summarise_quantised
from benchmarks.peers.rows import OURS, Row, find_bound
from benchmarks.peers.runner import Cell, Measured
from benchmarks.peers.weights import ModelFiles
from rich.table import Table

FLOOR_BOUND = 0.85
_FLOOR_ROW = "decode 1"


def build_model_report(
    files: ModelFiles, rows: Sequence[Row], measured: Measured
) -> dict[str, Any]:
    """Return one model's rows, its floors, its failures and facts about the peers."""
    cells = measured.cells
    return {
        "model": files.name,
        "rows": [summarise_row(files.name, row, cells) for row in rows if not row.is_quantised],
        "floor": compare_with_floor(measured, files.step_bytes, _FLOOR_ROW, FLOOR_BOUND),
        "quantised": summarise_quantised(files.name, rows, measured, files.file_step_bytes),
        "failures": collect_failures(cells),
        "peers": measured.facts,
        "cells": [asdict(cell) for cell in cells],
    }


def summarise_row(model: str, row: Row, cells: Sequence[Cell]) -> dict[str, Any]:
    """Return what each peer reached, and Forerun's ratio to the best of them, block by block."""
    own = [cell for cell in cells if cell.row == row.name]
    blocks = [find_values(own, row.name, block) for block in sorted({c.block for c in own})]
    pairs = compare_blocks((values.pop(OURS, None), values) for values in blocks)
    ratios = summarise_ratios(pairs)
    bound = find_bound(model, row)
    return {
        "row": row.name,
        "unit": "prompt tok/s" if row.kind == "prefill" else "output tok/s",
        "num_prompts": row.num_prompts,
        "peers": summarise_peers(own),
        **ratios,
        "bound": bound,
        "is_met": judge(ratios["ratio_median"], bound),
    }


def collect_failures(cells: Sequence[Cell]) -> dict[str, list[str]]:
    """Return every reason for a missing value, by peer, once each with the rows it spoiled."""
    rows: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        if cell.error is not None:
            rows.setdefault((cell.peer, cell.error), []).append(cell.row)
    failures: dict[str, list[str]] = {}
    for (peer, error), names in rows.items():
        where = ", ".join(dict.fromkeys(names))
        failures.setdefault(peer, []).append(f"{where}: {error}")
    return failures


def build_table(report: Mapping[str, Any], peers: Sequence[str]) -> Table:
    """Return one line per bf16 row: median and spread of every peer, the ratio and its bound."""
    table = Table(title=f"{report['model']}, bf16, tokens / s: median (min .. max)")
    table.add_column("row", no_wrap=True)
    for name in (*peers, "best peer", "ratio", "bound"):
        table.add_column(name, justify="right", no_wrap=name == "bound")
    for row in report["rows"]:
        cells = [format_peer(row["peers"].get(peer)) for peer in peers]
        bound = format_bound(row["bound"], row["is_met"])
        best = format_best(row)
        table.add_row(row["row"], *cells, best, format_ratio(row), bound)
    floor = report["floor"]
    if floor is not None:
        cells = format_shares(floor, peers)
        bound = f"{100 * floor['bound']:.0f} %"
        table.add_row(f"{floor['row']}, of the floor", *cells, "", "", bound)
        table.caption = format_floor(floor)
    return table


def build_notes(report: Mapping[str, Any]) -> list[str]:
    """Return the lines below a table: what stood in for a peer, and why values are missing."""
    remarks = {
        f"{peer}: {facts['remark']}": None
        for peer, phases in report["peers"].items()
        for facts in phases.values()
        if "remark" in facts
    }
    failures = [
        f"{peer} failed in {reason}"
        for peer, reasons in report["failures"].items()
        for reason in reasons
    ]
    return [*remarks, *failures]

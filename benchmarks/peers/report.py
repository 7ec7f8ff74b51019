"""From cells to medians, spread, ratios to the best peer, the table and the JSON. Pure.

The best peer is chosen anew in every block, so noise helps the peers: a ratio is Forerun over the
highest of the others in the same block. A peer without a value keeps its column and shows why.
The floor of one stream is weight bytes over the bandwidth measured at the start of the same block.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.peers.rows import Row, find_bound
from benchmarks.peers.runner import Cell, Measured
from rich.table import Table

from forerun.bench.paired.compare import compute_ratio_interval

OURS = "forerun"
FLOOR_BOUND = 0.85
_FLOOR_ROW = "decode 1"


def build_model_report(
    model: str, rows: Sequence[Row], measured: Measured, step_bytes: int
) -> dict[str, Any]:
    """Return one model's rows, its floor, its failures and facts about the peers."""
    return {
        "model": model,
        "step_bytes": step_bytes,
        "rows": [summarise_row(model, row, measured.cells) for row in rows],
        "floor": compare_with_floor(measured, step_bytes),
        "failures": collect_failures(measured.cells),
        "peers": measured.facts,
        "cells": [asdict(cell) for cell in measured.cells],
    }


def summarise_row(model: str, row: Row, cells: Sequence[Cell]) -> dict[str, Any]:
    """Return what each peer reached, and Forerun's ratio to the best of them, block by block."""
    own = [cell for cell in cells if cell.row == row.name]
    peers = {peer: _summarise_peer(own, peer) for peer in dict.fromkeys(cell.peer for cell in own)}
    ratios, best = _compare_blocks(own)
    low, high = compute_ratio_interval(ratios)
    median = statistics.median(ratios) if ratios else None
    bound = find_bound(model, row)
    return {
        "row": row.name,
        "unit": "prompt tok/s" if row.kind == "prefill" else "output tok/s",
        "num_prompts": row.num_prompts,
        "peers": peers,
        "best_peers": best,
        "ratios": ratios,
        "ratio_median": median,
        "ratio_min": min(ratios, default=None),
        "ratio_max": max(ratios, default=None),
        "ratio_low": low,
        "ratio_high": high,
        "bound": bound,
        "is_met": None if median is None or bound is None else median >= bound,
    }


def _summarise_peer(cells: Sequence[Cell], peer: str) -> dict[str, Any]:
    own = [cell for cell in cells if cell.peer == peer]
    values = [cell.value for cell in own if cell.value is not None]
    return {
        "values": [cell.value for cell in own],
        "median": statistics.median(values) if values else None,
        "min": min(values, default=None),
        "max": max(values, default=None),
        "errors": list(dict.fromkeys(cell.error for cell in own if cell.error is not None)),
    }


def _compare_blocks(cells: Sequence[Cell]) -> tuple[list[float], list[str]]:
    """Return Forerun / best peer and that peer's name, for each block that has both."""
    ratios, best = [], []
    for block in sorted({cell.block for cell in cells}):
        values = {c.peer: c.value for c in cells if c.block == block and c.value is not None}
        ours = values.pop(OURS, None)
        if ours is not None and values:
            name = max(values, key=values.__getitem__)
            ratios.append(ours / values[name])
            best.append(name)
    return ratios, best


def compare_with_floor(measured: Measured, step_bytes: int) -> dict[str, Any] | None:
    """Return each peer's decode speed at one stream as a share of the floor, block by block."""
    cells = [cell for cell in measured.cells if cell.row == _FLOOR_ROW and cell.value is not None]
    if not cells:
        return None
    floors = [bandwidth / step_bytes for bandwidth in measured.bandwidths]
    shares: dict[str, list[float]] = {}
    for cell in cells:
        assert cell.value is not None
        shares.setdefault(cell.peer, []).append(cell.value / floors[cell.block])
    return {
        "bandwidths": measured.bandwidths,
        "bandwidth_median": statistics.median(measured.bandwidths),
        "floor_ms": 1e3 * step_bytes / statistics.median(measured.bandwidths),
        "shares": shares,
        "share_medians": {peer: statistics.median(values) for peer, values in shares.items()},
        "bound": FLOOR_BOUND,
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
    """Return one line per row: median and spread of every peer, then the ratio and its bound."""
    table = Table(title=f"{report['model']}, bf16, tokens / s: median (min .. max)")
    table.add_column("row", no_wrap=True)
    for name in (*peers, "best peer", "ratio", "bound"):
        table.add_column(name, justify="right", no_wrap=name == "bound")
    for row in report["rows"]:
        cells = [_format_peer(row["peers"].get(peer)) for peer in peers]
        table.add_row(row["row"], *cells, *_format_ratio(row))
    floor = report["floor"]
    if floor is not None:
        shares = floor["share_medians"]
        cells = [f"{100 * shares[peer]:.0f} %" if peer in shares else "" for peer in peers]
        label = f"{_FLOOR_ROW}, of the floor"
        table.add_row(label, *cells, "", "", f"{100 * floor['bound']:.0f} %")
        table.caption = (
            f"floor of one stream {floor['floor_ms']:.1f} ms: {report['step_bytes'] / 1e6:.0f} MB "
            f"of weights at {floor['bandwidth_median'] / 1e9:.1f} GB/s"
        )
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


def _format_peer(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return ""
    if entry["median"] is None:
        return "failed"
    spread = f"{_format(entry['min'])} .. {_format(entry['max'])}"
    mark = " *" if entry["errors"] else ""
    return f"{_format(entry['median'])} ({spread}){mark}"


def _format(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _format_ratio(row: Mapping[str, Any]) -> tuple[str, str, str]:
    bound = "" if row["bound"] is None else f"{row['bound']:.2f}"
    if row["ratio_median"] is None:
        return "", "", bound
    spread = f"{row['ratio_min']:.2f} .. {row['ratio_max']:.2f}"
    verdict = "" if row["is_met"] is None else (" ok" if row["is_met"] else " MISS")
    names = "/".join(dict.fromkeys(row["best_peers"]))
    return names, f"{row['ratio_median']:.2f} ({spread})", bound + verdict

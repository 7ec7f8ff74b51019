"""From cells to what peers reached: medians, spread, ratios, shares of the floor. Pure.

The floor of one stream is weight bytes over the bandwidth measured at the start of the same block.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.peers.runner import Cell, Measured

from forerun.bench.paired.compare import compute_ratio_interval


def summarise_peers(cells: Sequence[Cell]) -> dict[str, dict[str, Any]]:
    """Return the figures of every peer of a row's cells."""
    return {peer: _summarise_peer(cells, peer) for peer in dict.fromkeys(c.peer for c in cells)}


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


def compare_blocks(
    blocks: Iterable[tuple[float | None, Mapping[str, float]]],
) -> list[tuple[str, float]]:
    """Return the best peer and Forerun's ratio to it, for each block that has both sides."""
    pairs = []
    for ours, others in blocks:
        if ours is not None and others:
            best = max(others, key=others.__getitem__)
            pairs.append((best, ours / others[best]))
    return pairs


def summarise_ratios(pairs: Sequence[tuple[str, float]]) -> dict[str, Any]:
    """Return the figures of (peer, Forerun / that peer), one for each block."""
    ratios = [ratio for _, ratio in pairs]
    low, high = compute_ratio_interval(ratios)
    return {
        "best_peers": [peer for peer, _ in pairs],
        "ratios": ratios,
        "ratio_median": statistics.median(ratios) if ratios else None,
        "ratio_min": min(ratios, default=None),
        "ratio_max": max(ratios, default=None),
        "ratio_low": low,
        "ratio_high": high,
    }


def judge(ratio: float | None, bound: float | None) -> bool | None:
    """Return whether a bound is reached; None where there is no ratio or no bound."""
    return None if ratio is None or bound is None else ratio >= bound


def find_values(cells: Sequence[Cell], row: str, block: int) -> dict[str, float]:
    """Return what every peer reached in a row of a block, failures left out."""
    return {
        cell.peer: cell.value
        for cell in cells
        if cell.row == row and cell.block == block and cell.value is not None
    }


def compare_with_floor(
    measured: Measured, step_bytes: int, row: str, bound: float | None
) -> dict[str, Any] | None:
    """Return each peer's speed in a row of one stream as a share of the floor, block by block."""
    cells = [cell for cell in measured.cells if cell.row == row and cell.value is not None]
    if not cells:
        return None
    shares: dict[str, list[float]] = {}
    for cell in cells:
        assert cell.value is not None
        floor = measured.bandwidths[cell.block] / step_bytes
        shares.setdefault(cell.peer, []).append(cell.value / floor)
    bandwidth = statistics.median(measured.bandwidths)
    return {
        "row": row,
        "step_bytes": step_bytes,
        "bandwidths": measured.bandwidths,
        "bandwidth_median": bandwidth,
        "floor_ms": 1e3 * step_bytes / bandwidth,
        "shares": shares,
        "share_medians": {peer: statistics.median(values) for peer, values in shares.items()},
        "bound": bound,
    }


def format_peer(entry: Mapping[str, Any] | None) -> str:
    """Return median and spread of a peer; a star where a block failed."""
    if entry is None:
        return ""
    if entry["median"] is None:
        return "failed"
    spread = f"{_format(entry['min'])} .. {_format(entry['max'])}"
    mark = " *" if entry["errors"] else ""
    return f"{_format(entry['median'])} ({spread}){mark}"


def format_ratio(figures: Mapping[str, Any]) -> str:
    """Return median and spread of a ratio."""
    if figures["ratio_median"] is None:
        return ""
    spread = f"{figures['ratio_min']:.2f} .. {figures['ratio_max']:.2f}"
    return f"{figures['ratio_median']:.2f} ({spread})"


def format_bound(bound: float | None, is_met: bool | None) -> str:
    """Return a bound and whether it is met."""
    if bound is None:
        return ""
    verdict = "" if is_met is None else (" ok" if is_met else " MISS")
    return f"{bound:.2f}{verdict}"


def format_best(figures: Mapping[str, Any]) -> str:
    """Return the names of the peers that were best in some block."""
    return "/".join(dict.fromkeys(figures["best_peers"]))


def format_shares(floor: Mapping[str, Any], peers: Sequence[str]) -> list[str]:
    """Return one cell for each peer: its share of the floor."""
    shares = floor["share_medians"]
    return [f"{100 * shares[peer]:.0f} %" if peer in shares else "" for peer in peers]


def format_floor(floor: Mapping[str, Any]) -> str:
    """Return the caption that says what the floor is."""
    return (
        f"floor of one stream {floor['floor_ms']:.1f} ms: {floor['step_bytes'] / 1e6:.0f} MB "
        f"of weights at {floor['bandwidth_median'] / 1e9:.1f} GB/s"
    )


def _format(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"

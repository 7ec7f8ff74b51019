"""Quantised rows: Forerun's int8 mode from the model's own file, beside everybody. Pure.

Two ratios, block by block: to llama.cpp on the same file, and to the best peer in any precision,
which may be llama.cpp on the file or any peer in bf16 in the decode row of the same block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from benchmarks.peers.rows import (
    ANY_PRECISION,
    LLAMA_CPP,
    OURS,
    QUANTISED_PEERS,
    SAME_FILE,
    Row,
    find_quantised_bound,
)
from benchmarks.peers.runner import Cell, Measured
from rich.table import Table

# Of Forerun at one stream; the other models have none.
_FLOOR_BOUNDS = {"smollm2-135m-instruct": 0.6}
_LABELS = {SAME_FILE: "same file", ANY_PRECISION: "best peer"}


def summarise_quantised(
    model: str, rows: Sequence[Row], measured: Measured, file_step_bytes: int
) -> dict[str, Any] | None:
    """Return one model's quantised rows and their floor; None if there are none."""
    rows = [row for row in rows if row.is_quantised]
    if not rows:
        return None
    name, bound = "quantised 1", _FLOOR_BOUNDS.get(model)
    return {
        "rows": [summarise_quantised_row(model, row, measured.cells) for row in rows],
        "floor": compare_with_floor(measured, file_step_bytes, name, bound),
    }


def summarise_quantised_row(model: str, row: Row, cells: Sequence[Cell]) -> dict[str, Any]:
    """Return what everybody reached, both ratios, and the bound of one of them."""
    bf16_row = Row(kind="decode", num_streams=row.num_streams).name
    bf16 = [cell for cell in cells if cell.row == bf16_row and cell.peer != OURS]
    own = [cell for cell in cells if cell.row == row.name]
    same_file, any_precision = [], []
    for block in sorted({cell.block for cell in own}):
        values = find_values(own, row.name, block)
        ours = values.pop(OURS, None)
        on_file = {f"{peer} file": value for peer, value in values.items()}
        in_bf16 = find_values(bf16, bf16_row, block)
        others = on_file | {f"{peer} bf16": value for peer, value in in_bf16.items()}
        same_file.append((ours, on_file))
        any_precision.append((ours, others))
    ratios = {
        SAME_FILE: summarise_ratios(compare_blocks(same_file)),
        ANY_PRECISION: summarise_ratios(compare_blocks(any_precision)),
    }
    against, bound = find_quantised_bound(model, row) or (ANY_PRECISION, None)
    return {
        "row": row.name,
        "unit": "output tok/s",
        "peers": summarise_peers(own),
        "bf16_peers": summarise_peers(bf16),
        **ratios,
        "against": against,
        "bound": bound,
        "is_met": judge(ratios[against]["ratio_median"], bound),
    }


def build_quantised_table(report: Mapping[str, Any], peers: Sequence[str]) -> Table:
    """Return one line per row: both sides on the file, the bf16 figures, and both ratios."""
    quantised = report["quantised"]
    on_file = [peer for peer in QUANTISED_PEERS if peer in peers]
    others = [peer for peer in peers if peer != OURS]
    table = Table(
        title=f"{report['model']} from its own file, tokens / s: median (min .. max); "
        "bf16 from the decode rows of the same blocks"
    )
    table.add_column("row", no_wrap=True)
    for name in (
        *(f"{peer} {'int8' if peer == OURS else 'same file'}" for peer in on_file),
        *(f"{peer} bf16" for peer in others),
        *("best peer", "ratio to best", f"ratio to {LLAMA_CPP} same file", "bound"),
    ):
        table.add_column(name, justify="right", no_wrap=name == "bound")
    for row in quantised["rows"]:
        table.add_row(
            row["row"],
            *(format_peer(row["peers"].get(peer)) for peer in on_file),
            *(format_peer(row["bf16_peers"].get(peer)) for peer in others),
            format_best(row[ANY_PRECISION]),
            format_ratio(row[ANY_PRECISION]),
            format_ratio(row[SAME_FILE]),
            _format_bound(row),
        )
    _add_floor(table, quantised["floor"], on_file, len(others) + 3)
    return table


def _add_floor(
    table: Table, floor: Mapping[str, Any] | None, on_file: Sequence[str], num_blank: int
) -> None:
    if floor is None:
        return
    bound = "" if floor["bound"] is None else f"{100 * floor['bound']:.0f} %"
    cells = format_shares(floor, on_file)
    table.add_row(f"{floor['row']}, of the floor", *cells, *[""] * num_blank, bound)
    table.caption = format_floor(floor)


def _format_bound(row: Mapping[str, Any]) -> str:
    label = "" if row["bound"] is None else f" ({_LABELS[row['against']]})"
    return format_bound(row["bound"], row["is_met"]) + label

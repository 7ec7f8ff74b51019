"""Which linear layers and tables are held in blocks, and what becomes of the others.

A layer is held in blocks if every part of it is stored in a format that is computed as it is stored
or, where that is asked for, is made Q8_0. All others are dequantised; one line says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from forerun.kernels import find_kernels
from forerun.kernels.packed import measure_blocks
from forerun.layers.linear import Linear, StoredBlocks
from forerun.logs import get_logger
from forerun.models.decoder import DecoderModel
from forerun.models.spec import FLOAT_TYPES
from forerun.models.stored import StoredTensors
from forerun.quantisation.formats import FORMATS, Q8_0, BlockFormat, BlockTensor

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class PlannedBlocks:
    """The parts of a layer (local weight names) and the format each is held in.

    `num_bytes` is their size once packed; None where the reference multiplies.
    """

    parts: Mapping[str, BlockFormat]
    num_bytes: int | None

    def bind(self, stored: StoredTensors, on_done: Callable[[], None]) -> StoredBlocks:
        """Return the blocks as their layer will ask for them."""

        def done() -> None:
            for name in self.parts:
                stored.release(name)
            on_done()

        return StoredBlocks(
            num_bytes=self.num_bytes,
            read=lambda: [stored.read_blocks(name, kind) for name, kind in self.parts.items()],
            done=done,
        )


def plan_blocks(
    model: DecoderModel, stored: StoredTensors, *, quantise_floats: bool
) -> dict[Linear, PlannedBlocks]:
    """Return the layers to hold in blocks, and log why others are not."""
    slots = model.slots()
    plans: dict[Linear, PlannedBlocks] = {}
    reasons: Counter[str] = Counter()
    for linear, names in model.linear_parts():
        types = {name: stored.find_type(name) for name in names}
        rows = [slots[name].shape[0] for name in names]
        plan = _plan_linear(linear, types, rows, quantise_floats)
        if isinstance(plan, str):
            reasons[plan] += 1
        else:
            plans[linear] = plan
    if reasons:
        _log_plain(reasons, len(plans), model.embed.table.dtype)
    return plans


def _plan_linear(
    linear: Linear, types: Mapping[str, str], rows: Sequence[int], quantise_floats: bool
) -> PlannedBlocks | str:
    """Return how a layer is held in blocks, or why it is not."""
    parts: dict[str, BlockFormat] = {}
    for name, kind in types.items():
        is_made = quantise_floats and kind in FLOAT_TYPES
        found = Q8_0 if is_made else FORMATS.get(kind)
        if found is None:
            return f"stored as {kind}"
        if linear.in_features % found.block_size:
            return f"{linear.in_features} numbers in a row, no multiple of {found.block_size}"
        parts[name] = found
    if find_kernels() is None:
        return PlannedBlocks(parts, None)
    sizes = zip(parts.values(), rows, strict=True)
    num_bytes = measure_blocks([_shape(kind, n, linear.in_features) for kind, n in sizes])
    if num_bytes is None:
        return f"parts of {' + '.join(map(str, rows))} rows"
    return PlannedBlocks(parts, num_bytes)


def _shape(kind: BlockFormat, num_rows: int, in_features: int) -> BlockTensor:
    """Return a tensor to be measured, without memory."""
    return BlockTensor(np.broadcast_to(np.uint8(0), (num_rows, kind.row_bytes(in_features))), kind)


def _log_plain(reasons: Counter[str], num_held: int, dtype: torch.dtype) -> None:
    logger.warning(
        "%d of %d linear layers and tables are computed in %s, which no kernel computes quantised: "
        "%s",
        reasons.total(),
        num_held + reasons.total(),
        str(dtype).removeprefix("torch."),
        "; ".join(f"{reason} ({count})" for reason, count in reasons.items()),
    )

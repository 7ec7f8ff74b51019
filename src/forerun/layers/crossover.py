"""From how many rows on oneDNN multiplies faster than our kernel, measured at start.

Our kernel serves every row count from one copy of the weights and runs near the peak of
AVX512-BF16. On CPUs with matrix instructions (AMX) oneDNN can be far ahead for many rows: there,
and only there, both are timed, and large steps copy a weight back to its plain layout and hand it
to oneDNN if that clearly pays. Elsewhere, and always with `--batch-invariant`, nothing switches and
a row's bits never depend on the rows beside it; timing on a busy machine must not decide that.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from forerun.kernels.cpu import read_cpu_flags
from forerun.layers.linear import Linear
from forerun.logs import get_logger

logger = get_logger(__name__)

ROW_COUNTS = (64, 256)
_REPEATS = 5
_MATRIX_FLAG = "amx_bf16"
# Switching must gain a quarter: less is noise, and costs bit-identical results.
_MIN_GAIN = 1.25


@torch.inference_mode()
def measure_crossover(linear: Linear) -> int | None:
    """Return from how many rows on a packed layer is faster through oneDNN; None: from none."""
    if linear.dtype != torch.bfloat16 or _MATRIX_FLAG not in read_cpu_flags():
        return None
    for num_rows in ROW_COUNTS:
        x = torch.randn(num_rows, linear.in_features).to(linear.dtype)
        native_s, onednn_s = _time_in_turn(lambda: linear(x), lambda: linear.multiply_plain(x))  # noqa: B023
        logger.info(
            "linear layers, %d rows: native %.2f ms, oneDNN %.2f ms",
            num_rows,
            native_s * 1e3,
            onednn_s * 1e3,
        )
        if native_s > _MIN_GAIN * onednn_s:
            return num_rows
    return None


def _time_in_turn(first: Callable[[], object], second: Callable[[], object]) -> tuple[float, float]:
    """Return the best time of each, in seconds, after one run to warm up."""
    best = [float("inf"), float("inf")]
    for repeat in range(_REPEATS + 1):
        for index, function in enumerate((first, second)):
            started_s = time.perf_counter()
            function()
            if repeat > 0:
                best[index] = min(best[index], time.perf_counter() - started_s)
    return best[0], best[1]

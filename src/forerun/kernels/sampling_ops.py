"""Sampling over whole rows of logits, native: every function returns None where it cannot be.

The PyTorch code in `sampling` and `verification` is the definition, and what callers run on a None.
A native operation needs the CPU, float32 and rows whose numbers are dense. It computes the same up
to float rounding, each row independently of the others and of the number of threads.
Shapes: R rows, V vocabulary, C candidates, N draws, Q other distributions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels.abi import (
    ArgmaxParams,
    DrawListedParams,
    DrawParams,
    MeasureParams,
    SampleListedParams,
    SampleParams,
)
from forerun.kernels.row_calls import call_kernel, find_usable, list_sizes

# As in cpp/distribution.cpp: the sums of a row are kept per tile.
_TILE = 2048
# A part of a row that is worth a task of its own.
_MIN_SLICE = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRows:
    """Rows of logits and what was measured of them: p = exp(l / T - peak) * peak_prob."""

    logits: Tensor  # [R, V] float32
    temperature: Tensor  # [R, 1] float32
    peak: Tensor  # [R, 1] float32
    peak_prob: Tensor  # [R, 1] float32
    tile_probs: Tensor | None  # [R, tiles] float32, where measured natively


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """What each draw leaves out of its distribution p: one token, or all that q covers."""

    token_ids: Tensor  # [N] int64; -1 is none
    probs: Tensor | None  # [Q, V] float32: q
    rows: Tensor  # [N] int64, which q; -1 is none

    def select(self, draws: Tensor) -> LeftOut:
        """Return what some draws leave out."""
        return LeftOut(token_ids=self.token_ids[draws], probs=self.probs, rows=self.rows[draws])


def find_largest(values: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the first index of each row's maximum, int64 [R], and the maximum, float32 [R].

    A NaN counts as the maximum.
    """
    kernels = find_usable(values)
    if kernels is None:
        return None
    indices, largest = torch.empty(len(values), dtype=torch.int64), torch.empty(len(values))
    call_kernel(
        kernels.argmax,
        ArgmaxParams,
        {"x": values, "indices": indices, "values": largest},
        row_stride=values.stride(0),
        num_rows=len(values),
        size=values.shape[1],
    )
    return indices, largest


def measure_rows(logits: Tensor, temperature: Tensor) -> MeasuredRows | None:
    """Find the largest l / T of every row and its probability; `temperature` is [R, 1].

    A row with NaN, +inf or only -inf gets a peak or a probability that is not finite.
    """
    kernels = find_usable(logits)
    if kernels is None:
        return None
    temperature = temperature.contiguous()
    peak, peak_prob = torch.empty_like(temperature), torch.empty_like(temperature)
    tile_peaks, tile_probs = torch.empty(2, len(logits), -(-logits.shape[1] // _TILE))
    tensors = {
        "logits": logits,
        "temperature": temperature,
        "tile_peaks": tile_peaks,
        "tile_probs": tile_probs,
        "peaks": peak,
        "peak_probs": peak_prob,
    }
    call_kernel(kernels.measure, MeasureParams, tensors, **list_sizes(logits))
    return MeasuredRows(
        logits=logits,
        temperature=temperature,
        peak=peak,
        peak_prob=peak_prob,
        tile_probs=tile_probs,
    )


def sample_coupled(logits: Tensor, temperature: Tensor, keys: Tensor) -> Tensor | None:
    """Return argmax(l / T - log E(key, token)) of every row, int64 [R]."""
    kernels = find_usable(logits)
    if kernels is None:
        return None
    num_rows, vocab_size = logits.shape
    # Enough tasks for the threads to finish together; the result does not depend on it.
    num_tasks = 4 * torch.get_num_threads()
    num_slices = max(1, min(-(-num_tasks // num_rows), vocab_size // _MIN_SLICE))
    token_ids = torch.empty(num_rows, dtype=torch.int64)
    tensors = {
        "logits": logits,
        "temperature": temperature.contiguous(),
        "keys": keys.contiguous(),
        "scores": torch.empty(num_rows, num_slices, dtype=torch.float64),
        "slice_ids": torch.empty(num_rows, num_slices, dtype=torch.int64),
        "token_ids": token_ids,
    }
    call_kernel(kernels.sample, SampleParams, tensors, num_slices=num_slices, **list_sizes(logits))
    return token_ids


def sample_listed(probs: Tensor, listed_ids: Tensor, keys: Tensor) -> Tensor | None:
    """Return the listed id with the largest p / E(key, id) of every row, int64 [R].

    Probabilities [R, C] descend, zeros last.
    """
    kernels = find_usable(probs)
    if kernels is None or listed_ids.stride(-1) != 1:
        return None
    token_ids = torch.empty(len(probs), dtype=torch.int64)
    tensors = {
        "probs": probs,
        "listed_ids": listed_ids,
        "keys": keys.contiguous(),
        "token_ids": token_ids,
    }
    sizes = {
        "probs_stride": probs.stride(0),
        "ids_stride": listed_ids.stride(0),
        "num_rows": len(probs),
        "width": probs.shape[1],
    }
    call_kernel(kernels.sample_listed, SampleListedParams, tensors, **sizes)
    return token_ids


def draw_rows(
    given: MeasuredRows, rows: Tensor, uniforms: Tensor, left_out: LeftOut | None
) -> Tensor | None:
    """Return one token id per draw, int64 [N], from p of row `rows[i]` or from max(p - q, 0).

    Draws from p where nothing measurable is left of it; `uniforms` [N] are float64 in [0, 1).
    """
    kernels = find_usable(given.logits, _get_probs(left_out))
    if kernels is None or given.tile_probs is None:
        return None
    token_ids = torch.empty(len(rows), dtype=torch.int64)
    tensors: dict[str, Tensor | None] = {
        "logits": given.logits,
        "temperature": given.temperature,
        "peaks": given.peak,
        "peak_probs": given.peak_prob,
        "tile_probs": given.tile_probs,
        "tile_sums": torch.empty(len(rows), given.tile_probs.shape[1]),
        **_list_draws(rows, uniforms, left_out),
        "token_ids": token_ids,
    }
    sizes = {
        "row_stride": given.logits.stride(0),
        "left_out_stride": _get_stride(left_out),
        "num_draws": len(rows),
        "vocab_size": given.logits.shape[1],
    }
    call_kernel(kernels.draw, DrawParams, tensors, **sizes)
    return token_ids


def draw_listed(
    listed: tuple[Tensor, Tensor], rows: Tensor, uniforms: Tensor, left_out: LeftOut | None
) -> Tensor | None:
    """Do the same as draw_rows for rows of (probabilities, token ids), [R, C] each."""
    probs, listed_ids = listed
    kernels = find_usable(probs, _get_probs(left_out))
    if kernels is None or listed_ids.stride(-1) != 1:
        return None
    token_ids = torch.empty(len(rows), dtype=torch.int64)
    tensors: dict[str, Tensor | None] = {
        "probs": probs,
        "listed_ids": listed_ids,
        **_list_draws(rows, uniforms, left_out),
        "token_ids": token_ids,
    }
    sizes = {
        "probs_stride": probs.stride(0),
        "ids_stride": listed_ids.stride(0),
        "left_out_stride": _get_stride(left_out),
        "num_draws": len(rows),
        "width": probs.shape[1],
    }
    call_kernel(kernels.draw_listed, DrawListedParams, tensors, **sizes)
    return token_ids


def _get_probs(left_out: LeftOut | None) -> Tensor | None:
    return None if left_out is None else left_out.probs


def _list_draws(
    rows: Tensor, uniforms: Tensor, left_out: LeftOut | None
) -> dict[str, Tensor | None]:
    """Return the arguments that the two kinds of draws share."""
    tensors: dict[str, Tensor | None] = {
        "rows": rows.contiguous(),
        "uniforms": uniforms.double().contiguous(),
    }
    if left_out is not None:
        tensors["left_out"] = left_out.probs
        tensors["left_out_ids"] = left_out.token_ids.contiguous()
        tensors["left_out_rows"] = left_out.rows.contiguous()
    return tensors


def _get_stride(left_out: LeftOut | None) -> int:
    probs = _get_probs(left_out)
    return 0 if probs is None else probs.stride(0)

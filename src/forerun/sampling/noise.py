"""Counter-based noise: every random number is a pure function of what it is for.

A 64-bit key is mixed from (stream, seed, choice index, counter, position); a key gives one uniform,
or one exponential per token id (the token id is the counter of a splitmix64 sequence that starts
at the key). So noise depends neither on the batch nor on what else was evaluated, and a reduced
list of token ids sees the same values as the full vocabulary.

Changing anything here changes the text of every seeded request: golden values are pinned by tests.
Shapes: R rows (one key each), C token ids per row.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK_64 = 2**64 - 1

IntArray = np.ndarray | Sequence[int] | int


class Stream(enum.IntEnum):
    """What a random number is for. Numbers of different streams are independent."""

    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    BONUS = 4
    COUPLED = 5


def derive_keys(
    stream: Stream, seeds: IntArray, choices: IntArray, counters: IntArray, positions: IntArray = 0
) -> np.ndarray:
    """Return one int64 key per row; the arguments broadcast against each other.

    `counters` is the request's `num_draws` for the step-wise streams and the absolute position of
    the token for COUPLED. `positions` is the place inside the draft block (0 for COUPLED).
    """
    fields = np.broadcast_arrays(
        *(_as_uint64(field) for field in (seeds, int(stream), choices, counters, positions))
    )
    state = np.zeros(fields[0].shape, dtype=np.uint64)
    for field in fields:
        state = _mix_np(state + (field + np.uint64(1)) * np.uint64(_GOLDEN))
    return state.view(np.int64)


def coupled_keys(seeds: IntArray, choices: IntArray, positions: IntArray) -> np.ndarray:
    """Return the keys of the coupled stream: `positions` are absolute places in the sequence."""
    return derive_keys(Stream.COUPLED, seeds, choices, positions)


def uniform(keys: np.ndarray) -> np.ndarray:
    """Return one float64 in [0, 1) per key, a multiple of 2^-53."""
    bits = _mix_np(keys.view(np.uint64)) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def exponential(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return standard exponential noise E, float32 [R, C], for token ids [C] or [R, C].

    E = -log1p(-w), w = (x + 0.5) * 2^-32 with x the top 32 bits of the hash. Small E decides who
    wins an argmax, and small w has full float32 precision.
    """
    bits = _hash_tokens(keys, token_ids)
    w = bits.to(torch.float32).add_(0.5).mul_(2.0**-32)
    # NOTE: the largest x round to w = 1 in float32, which would make E infinite.
    return w.clamp_(max=1.0 - 2.0**-24).neg_().log1p_().neg_()


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return standard Gumbel noise g = -log(E), float32 [R, C]; arguments as in `exponential`.

    argmax(logits + g) draws from softmax(logits), and so does argmax(probs / E): the same token.
    """
    return exponential(keys, token_ids).log_().neg_()


def _hash_tokens(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return the top 32 bits of splitmix64(key, token id) as int64 in [0, 2^32), [R, C]."""
    z = keys[:, None] + token_ids * _signed(_GOLDEN)
    z.bitwise_xor_(_shift_right(z, 30)).mul_(_signed(_MIX_1))
    z.bitwise_xor_(_shift_right(z, 27)).mul_(_signed(_MIX_2))
    # NOTE: splitmix64 ends with z ^= z >> 31, which leaves the top 31 bits as they are.
    return _shift_right(z, 32)


def _shift_right(z: Tensor, num_bits: int) -> Tensor:
    # NOTE: >> on int64 is arithmetic; masking off the copied sign bits makes it logical.
    return torch.bitwise_right_shift(z, num_bits).bitwise_and_((1 << (64 - num_bits)) - 1)


def _mix_np(z: np.ndarray) -> np.ndarray:
    """Return the splitmix64 finaliser of uint64 values (modulo 2^64)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_2)
    return z ^ (z >> np.uint64(31))


def _as_uint64(values: IntArray) -> np.ndarray:
    """Return values modulo 2^64, at least one-dimensional (scalars would warn on wraparound)."""
    if isinstance(values, np.ndarray):
        return np.atleast_1d(values.astype(np.int64, copy=False)).view(np.uint64)
    given = [values] if isinstance(values, int) else values
    return np.array([int(value) & _MASK_64 for value in given], dtype=np.uint64)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value

"""CostProfile: what a step costs on one machine, as measured, and look-ups in it.

cost(step) = verify(rows) + request_ms * N + kv_token_ms * sum(C) + sampling terms + draft(N_d, k)
           + row_token_ms * sum((rows of the request - 1) * (C - context_tokens))

Pure NumPy: the simulator and the policy share it. A look-up is one np.interp: steps up to
`graph_rows`, the last slope beyond the table and "no requests, no drafting" are points of the
curve, made once. Symbols: n measured row counts, m measured numbers of drafting requests, N
requests with C cached tokens each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

FORMAT = "forerun-cost-profile"
FORMAT_VERSION = 1

# Where the last slope of a table ends: past any step there can be.
_FAR = float(2**40)
# The least that counts as a request.
_ANY = 1e-9
_SLOPES = ("request_ms", "kv_token_ms", "row_token_ms", "sampled_row_ms", "filtered_row_ms")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CostProfile:
    """What a step costs on this machine, in ms. Raises ValueError for what cannot be a cost.

    `verify_ms` is a target step over that many rows by as few requests as possible, greedy, with
    the request and context terms taken out. Up to `graph_rows`, one of `verify_rows` or 0, a step
    costs what the next measured size does. Tables become monotone by running maximum.
    """

    verify_rows: np.ndarray  # [n] int64, strictly increasing from 1
    verify_ms: np.ndarray  # [n] float64
    graph_rows: int = 0
    request_ms: float  # more, per request, than its rows alone cost
    kv_token_ms: float  # per cached context token, each request's context once
    row_token_ms: float = (
        0.0  # per row after a request's first and cached token past the next field
    )
    context_tokens: int = 0  # cached tokens of each request when `verify_ms` was timed
    sampled_row_ms: float  # per sampled row without filters, beyond greedy
    filtered_row_ms: float  # per sampled row with top-k, top-p or min-p, beyond greedy
    draft_requests: np.ndarray  # [m] int64, strictly increasing from 1; empty without a drafter
    draft_first_ms: np.ndarray  # [m] float64, one token for each of so many requests
    draft_next_ms: np.ndarray  # [m] float64, each further token
    key: Mapping[str, str]
    source: str

    _verify_curve: tuple[np.ndarray, np.ndarray] = field(init=False, repr=False)
    _first_curve: tuple[np.ndarray, np.ndarray] = field(init=False, repr=False)
    _next_curve: tuple[np.ndarray, np.ndarray] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        rows = _read_counts("verify_rows", self.verify_rows)
        requests = _read_counts("draft_requests", self.draft_requests)
        if not len(rows):
            raise ValueError("verify_rows is empty; a profile has at least one row count")
        if self.graph_rows != 0 and self.graph_rows not in rows:
            raise ValueError(f"graph_rows is {self.graph_rows}, which is no measured row count")
        if self.context_tokens < 0:
            raise ValueError(f"context_tokens must be at least 0, got {self.context_tokens}")
        for name in _SLOPES:
            _set(self, name, float(_read_costs(name, [getattr(self, name)], 1)[0]))
        _set(self, "verify_rows", rows)
        _set(self, "verify_ms", _read_costs("verify_ms", self.verify_ms, len(rows)))
        _set(self, "draft_requests", requests)
        for name in ("draft_first_ms", "draft_next_ms"):
            _set(self, name, _read_costs(name, getattr(self, name), len(requests)))
        _set(self, "key", dict(self.key))
        _set(self, "_verify_curve", self.trace(self.verify_ms))
        _set(self, "_first_curve", _trace_from_zero(requests, self.draft_first_ms))
        _set(self, "_next_curve", _trace_from_zero(requests, self.draft_next_ms))

    def verify(self, rows: np.ndarray | float) -> np.ndarray:
        """Return the ms of a target step over so many rows, before the other terms."""
        ms: np.ndarray = np.interp(rows, *self._verify_curve)
        return ms

    def draft(self, num_requests: np.ndarray | float, depth: np.ndarray | int) -> np.ndarray:
        """Return the ms of drafting `depth` tokens for so many requests; 0 for no request."""
        first = np.interp(num_requests, *self._first_curve)
        further = np.interp(num_requests, *self._next_curve)
        num_further = np.maximum(np.subtract(depth, 1), 0)
        ms: np.ndarray = np.minimum(depth, 1) * first + num_further * further
        return ms

    def trace(self, verify_ms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the curve of `verify` if these were the costs of its sizes, for np.interp."""
        return _trace_steps(self.verify_rows, verify_ms, self.graph_rows)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values, each measured size beside its cost; `from_dict` reads them."""
        verify = zip(self.verify_rows.tolist(), self.verify_ms.tolist(), strict=True)
        draft = zip(
            self.draft_requests.tolist(),
            self.draft_first_ms.tolist(),
            self.draft_next_ms.tolist(),
            strict=True,
        )
        return {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "key": dict(self.key),
            "graph_rows": self.graph_rows,
            "context_tokens": self.context_tokens,
            **{name: getattr(self, name) for name in _SLOPES},
            "verify": [{"rows": rows, "ms": ms} for rows, ms in verify],
            "draft": [{"requests": n, "first_ms": a, "next_ms": b} for n, a, b in draft],
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any], *, source: str) -> CostProfile:
        """Rebuild a profile; raises ValueError saying what is wrong with it."""
        if value.get("format") != FORMAT or value.get("version") != FORMAT_VERSION:
            raise ValueError(
                f"format is {value.get('format')!r} version {value.get('version')!r}, this reads "
                f"{FORMAT!r} version {FORMAT_VERSION}"
            )
        try:
            return cls(
                verify_rows=_read_column(value["verify"], "rows"),
                verify_ms=_read_column(value["verify"], "ms"),
                graph_rows=int(value["graph_rows"]),
                context_tokens=int(value["context_tokens"]),
                **{name: value[name] for name in _SLOPES},
                draft_requests=_read_column(value["draft"], "requests"),
                draft_first_ms=_read_column(value["draft"], "first_ms"),
                draft_next_ms=_read_column(value["draft"], "next_ms"),
                key={str(name): str(text) for name, text in value["key"].items()},
                source=source,
            )
        except KeyError as error:
            raise ValueError(f"{error.args[0]!r} is missing") from error
        except (TypeError, AttributeError) as error:
            raise ValueError(f"a value has the wrong type ({error})") from error


def _set(profile: CostProfile, name: str, value: object) -> None:
    object.__setattr__(profile, name, value)


def _read_column(rows: Sequence[Mapping[str, float]], name: str) -> np.ndarray:
    return np.array([row[name] for row in rows], dtype=np.float64)


def _read_counts(name: str, given: np.ndarray) -> np.ndarray:
    """Return counts as int64; they must be whole numbers, strictly increasing from 1."""
    values = np.asarray(given, dtype=np.float64)
    if not np.isfinite(values).all() or (values != np.floor(values)).any():
        raise ValueError(f"{name} must be whole numbers, got {values.tolist()}")
    if len(values) and (values[0] != 1 or (np.diff(values) <= 0).any() or values[-1] >= _FAR):
        raise ValueError(f"{name} must rise strictly from 1, got {values.tolist()}")
    return values.astype(np.int64)


def _read_costs(name: str, given: np.ndarray | list[float], length: int) -> np.ndarray:
    """Return costs that never fall; they must be finite and not negative."""
    values = np.asarray(given, dtype=np.float64)
    if values.shape != (length,):
        raise ValueError(f"{name} must have {length} entries, got shape {list(values.shape)}")
    if not np.isfinite(values).all() or (values < 0).any():
        raise ValueError(f"{name} must be finite and not negative, got {values.tolist()}")
    rising: np.ndarray = np.maximum.accumulate(values)
    return rising


def _trace_steps(rows: np.ndarray, ms: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the points of the verification curve: steps up to the limit, lines after it.

    A step from size a to size b is two points: b's cost just after a, and at b. What follows the
    limit starts the same way, so that nothing is interpolated across it.
    """
    x, y = [float(rows[0])], [float(ms[0])]
    sizes, costs = rows.tolist(), ms.tolist()
    for last, size, cost in zip(sizes, sizes[1:], costs[1:], strict=False):
        if last <= limit:
            x.append(float(np.nextafter(last, _FAR)))
            y.append(cost)
        x.append(float(size))
        y.append(cost)
    return _extend(x, y, rows, ms)


def _trace_from_zero(requests: np.ndarray, ms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the points of a drafting curve: nothing for no request, then lines."""
    if not len(requests):
        return np.array([0.0, _FAR]), np.zeros(2)
    x = [0.0, _ANY, *requests.tolist()]
    return _extend(x, [0.0, float(ms[0]), *ms.tolist()], requests, ms)


def _extend(
    x: list[float], y: list[float], sizes: np.ndarray, ms: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Continue a curve by the slope between its last two measured sizes."""
    slope = (ms[-1] - ms[-2]) / (sizes[-1] - sizes[-2]) if len(sizes) > 1 else 0.0
    x.append(_FAR)
    y.append(float(ms[-1] + slope * (_FAR - sizes[-1])))
    return np.array(x), np.array(y)

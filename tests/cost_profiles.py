"""Cost profiles for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from forerun.budget.costs.profile import CostProfile


def make_profile(**changes: Any) -> CostProfile:
    """Return a small profile; `changes` are its fields."""
    fields: dict[str, Any] = {
        "verify_rows": np.array([1, 2, 4, 8]),
        "verify_ms": np.array([3.0, 3.0, 4.0, 6.0]),
        "request_ms": 0.1,
        "kv_token_ms": 0.001,
        "row_token_ms": 0.0005,
        "context_tokens": 128,
        "sampled_row_ms": 0.02,
        "filtered_row_ms": 0.05,
        "draft_requests": np.array([1, 4]),
        "draft_first_ms": np.array([0.5, 2.0]),
        "draft_next_ms": np.array([0.1, 0.4]),
        "key": {"dtype": "bfloat16", "device": "a CPU"},
        "source": "measured",
    }
    return CostProfile(**{**fields, **changes})

"""How a request's tokens are chosen: the one rule that verifier and drafters share.

greedy: the argmax. coupled: the Gumbel-max sample with noise keyed by seed and absolute position,
so a drafter can draw with the same noise. standard: drawn with noise of the request's step counter.
"""

from __future__ import annotations

from forerun.core import SamplingParams

DEFAULT_METHODS = ("standard", "coupled")


def choose_method(params: SamplingParams, default_method: str) -> str:
    """Return greedy, coupled or standard; the default is that of unseeded sampled requests."""
    if params.is_greedy:
        return "greedy"
    return "coupled" if params.seed is not None else default_method

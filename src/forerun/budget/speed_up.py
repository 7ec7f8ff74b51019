"""How much faster than plain decoding the engine has been lately. No torch.

A ratio of two sums over steps that fade with age: the time plain decoding would have taken for the
same tokens, and the time that was taken. Relative to plain decoding, so that it holds when the
number of requests changes; tokens are counted when they are known, so it rests on past steps only.
"""

from __future__ import annotations

_FADE = 0.98
_LARGEST = 33.0


class SpeedUp:
    """The running ratio; 1 before the first step, and never below: then nobody should draft."""

    def __init__(self) -> None:
        self._plain_ms = 0.0
        self._taken_ms = 0.0
        self.value = 1.0

    @property
    def is_known(self) -> bool:
        """Whether there was a step yet."""
        return self._taken_ms > 0.0

    def observe(
        self, num_tokens: float, num_requests: int, plain_ms: float, taken_ms: float
    ) -> None:
        """Take in a step of so many requests whose plain decode step would take `plain_ms`."""
        if num_requests == 0 or taken_ms <= 0.0:
            return
        self._plain_ms = _FADE * self._plain_ms + num_tokens / num_requests * plain_ms
        self._taken_ms = _FADE * self._taken_ms + taken_ms
        self.value = min(max(self._plain_ms / self._taken_ms, 1.0), _LARGEST)

"""What `forerun generate --explain` prints: one line per step, for people.

step 12   survival .93 .81 .62   B 2 of 3   5 ms expected, 4.8 taken   accepted 2   "the cat"
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from forerun.tokenization import Tokenizer

if TYPE_CHECKING:
    from forerun.engine.trace import RequestTrace, StepTrace


class StepExplainer:
    """Writes the trace of every step to a stream."""

    def __init__(self, tokenizer: Tokenizer, stream: TextIO) -> None:
        self._tokenizer = tokenizer
        self._stream = stream

    def write(self, trace: StepTrace) -> None:
        """Write one step; it holds one request unless several choices were asked for."""
        for request in trace.requests:
            self._stream.write(self.format(trace, request) + "\n")

    def format(self, trace: StepTrace, request: RequestTrace) -> str:
        """Return the line of one request of a step."""
        parts = [f"step {trace.step:<4}", f"rows {trace.num_rows:<3}"]
        num_drafts = len(request.draft_token_ids)
        if request.survival:
            parts.append("survival " + _format_chances(request.survival))
        if num_drafts:
            parts.append(f"B {request.num_admitted} of {num_drafts}")
            parts.append(f"accepted {request.num_accepted}")
        else:
            parts.append("no drafts")
        if trace.predicted_ms:
            parts.append(f"{trace.predicted_ms:.1f} ms expected, {trace.measured_ms:.1f} taken")
        else:
            parts.append(f"{trace.measured_ms:.1f} ms")
        if trace.state:
            parts.append(trace.state.replace("_", " "))
        text = self._tokenizer.decode(request.emitted_token_ids, skip_special_tokens=False)
        return "   ".join([*parts, repr(text)])


def _format_chances(chances: Sequence[float]) -> str:
    return " ".join(f"{chance:.2f}".removeprefix("0") for chance in chances)

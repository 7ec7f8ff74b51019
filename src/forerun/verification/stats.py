"""Counts of speculation: what was drafted, verified, accepted. No torch.

A *spec step* is one target step of one request that verified at least one draft. Drafted >=
verified >= accepted; none of them counts the recovered or bonus token. Ratios are made from totals
at the very end, so counts of steps, requests or replicas add up.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class SpecStats:
    """Totals; lists are indexed by draft position from 0.

    `acceptance_histogram[v][a]` counts spec steps that verified v drafts and accepted a of them.
    """

    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_verified_tokens: int = 0
    num_accepted_tokens: int = 0
    verified_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    acceptance_histogram: dict[int, list[int]] = field(default_factory=dict)

    def record(self, *, num_drafted: int, num_verified: int, num_accepted: int) -> None:
        """Count one request's step. Nothing verified (all trimmed) is no spec step."""
        counts = (num_drafted, num_verified, num_accepted)
        assert num_drafted >= num_verified >= num_accepted >= 0, counts
        self.num_draft_tokens += num_drafted
        if not num_verified:
            return
        self.num_spec_steps += 1
        self.num_verified_tokens += num_verified
        self.num_accepted_tokens += num_accepted
        _add_lists(self.verified_per_position, [1] * num_verified)
        _add_lists(
            self.accepted_per_position, [1] * num_accepted + [0] * (num_verified - num_accepted)
        )
        histogram = self.acceptance_histogram.setdefault(num_verified, [0] * (num_verified + 1))
        histogram[num_accepted] += 1

    def merge(self, other: SpecStats) -> None:
        """Add another's totals to these."""
        self.num_spec_steps += other.num_spec_steps
        self.num_draft_tokens += other.num_draft_tokens
        self.num_verified_tokens += other.num_verified_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        _add_lists(self.verified_per_position, other.verified_per_position)
        _add_lists(self.accepted_per_position, other.accepted_per_position)
        for num_verified, counts in other.acceptance_histogram.items():
            _add_lists(self.acceptance_histogram.setdefault(num_verified, []), counts)

    @property
    def acceptance_length(self) -> float | None:
        """Mean emitted tokens per spec step: 1 + accepted / spec steps. None before the first."""
        if not self.num_spec_steps:
            return None
        return 1 + self.num_accepted_tokens / self.num_spec_steps

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / verified. None before the first verified draft."""
        return _divide(self.num_accepted_tokens, self.num_verified_tokens)

    @property
    def draft_yield(self) -> float | None:
        """Accepted / drafted: what trimming leaves of the drafter's work."""
        return _divide(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def survival_per_position(self) -> list[float]:
        """Per position: steps that accepted up to it / steps that verified it."""
        pairs = zip(self.accepted_per_position, self.verified_per_position, strict=True)
        return [accepted / verified for accepted, verified in pairs]


def _add_lists(total: list[int], more: list[int]) -> None:
    """Add position by position, growing the total."""
    total.extend([0] * (len(more) - len(total)))
    for position, count in enumerate(more):
        total[position] += count


def _divide(numerator: int, denominator: int) -> float | None:
    return numerator / denominator if denominator else None

"""Where the rows, drafts and random keys of a group of requests lie.

Request i owns rows row_starts[i] .. row_starts[i] + num_drafts[i]; row j predicts the token after
the committed tokens and the drafts before j. Drafts are flat, in the same order.
Shapes: N requests, D drafts, R = N + D rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np

from forerun.plan import ScheduledRequest
from forerun.sampling.filters import RowFilters
from forerun.sampling.noise import Stream, coupled_keys, derive_keys, uniform

_MASK_64 = 2**64 - 1


class VerifyLayout:
    """Host arrays of one group, int64, each made when somebody needs it.

    Greedy steps without drafts are most steps there are, and need none.
    """

    def __init__(self, requests: Sequence[ScheduledRequest]) -> None:
        self.requests = requests
        # First row of each request, and the number of rows after the last.
        ends = accumulate(1 + len(request.draft_token_ids) for request in requests)
        *self.starts, self.num_rows = [0, *ends]

    @cached_property
    def num_drafts(self) -> np.ndarray:
        """Drafts of each request, [N]."""
        return np.array([len(r.draft_token_ids) for r in self.requests], dtype=np.int64)

    @cached_property
    def row_starts(self) -> np.ndarray:
        """First row of each request, [N]."""
        return np.array(self.starts, dtype=np.int64)

    @cached_property
    def draft_starts(self) -> np.ndarray:
        """First draft of each request, [N]."""
        starts: np.ndarray = self.row_starts - np.arange(len(self.requests))
        return starts

    @cached_property
    def draft_request(self) -> np.ndarray:
        """The request of each draft, [D]."""
        return np.repeat(np.arange(len(self.requests)), self.num_drafts)

    @cached_property
    def draft_position(self) -> np.ndarray:
        """The place of each draft inside its request's, from 0, [D]."""
        places = np.arange(len(self.draft_request))
        within: np.ndarray = places - self.draft_starts[self.draft_request]
        return within

    @property
    def draft_rows(self) -> np.ndarray:
        """The row whose distribution judges each draft, [D]."""
        rows: np.ndarray = self.row_starts[self.draft_request] + self.draft_position
        return rows

    @property
    def draft_token_ids(self) -> np.ndarray:
        """All drafts, flat, [D]."""
        flat = [token for request in self.requests for token in request.draft_token_ids]
        return np.array(flat, dtype=np.int64)

    def build_filters(self) -> RowFilters:
        """Return the sampling parameters of every row."""
        return RowFilters.from_params([r.params for r in self.requests], self.num_drafts + 1)

    def draw_accept_uniforms(self) -> np.ndarray:
        """Return one uniform per draft, [D] float64."""
        seeds, choices, num_draws = (a[self.draft_request] for a in self._read_identity())
        return uniform(derive_keys(Stream.ACCEPT, seeds, choices, num_draws, self.draft_position))

    def draw_next_uniforms(self, stream: Stream) -> np.ndarray:
        """Return one uniform per request for its next token, [N] float64."""
        return uniform(derive_keys(stream, *self._read_identity()))

    def derive_coupled_keys(self) -> np.ndarray:
        """Return the key of every row, by the absolute position of the token it predicts, [R]."""
        seeds, choices, _ = self._read_identity()
        lengths = np.array([len(r.token_ids) for r in self.requests], dtype=np.int64)
        owner = np.repeat(np.arange(len(self.requests)), self.num_drafts + 1)
        positions = lengths[owner] + np.arange(self.num_rows) - self.row_starts[owner]
        return coupled_keys(seeds[owner], choices[owner], positions)

    def _read_identity(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return seed, choice index and step counter of every request, [N] each."""
        seeds = np.array([r.seed & _MASK_64 for r in self.requests], dtype=np.uint64)
        choices = np.array([r.choice_index for r in self.requests], dtype=np.int64)
        num_draws = np.array([r.num_draws for r in self.requests], dtype=np.int64)
        return seeds.view(np.int64), choices, num_draws

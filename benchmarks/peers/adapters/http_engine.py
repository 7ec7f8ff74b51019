"""Engine rows of a peer that has only a server: prompts of ids over HTTP, rates from its events.

One event counts as one token. Used by llama.cpp's prebuilt stand-in alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.peers.adapters.base import Measurement, Work
from benchmarks.peers.adapters.group import PeerError
from benchmarks.peers.adapters.server import FreshServer
from benchmarks.peers.rates import (
    RateError,
    compute_decode_rate,
    compute_prefill_rate,
    merge_streams,
)

from forerun.bench.records import RequestRecord


class HttpEngine:
    """Sends all prompts at once and reads the steps off the clients' time stamps."""

    def __init__(self, server: FreshServer, folder: Path) -> None:
        self._server = server
        self._folder = folder
        self.facts = server.facts

    def measure(self, work: Work) -> Measurement:
        """Send the row's prompts and compute its rate."""
        path = self._folder / "prompts.jsonl"
        path.write_text("".join(json.dumps({"prompt": ids}) + "\n" for ids in work.prompts))
        bench = replace(
            work.bench,
            dataset_name="custom",
            dataset_path=str(path),
            disable_shuffle=True,
            ignore_eos=True,
        )
        outcome = self._server.run(replace(work, bench=bench))
        try:
            return Measurement(_compute_rate(work, outcome.records))
        except RateError as error:
            raise PeerError(str(error)) from error

    def stop(self) -> None:
        """Nothing runs between measurements."""


def _compute_rate(work: Work, records: Sequence[RequestRecord]) -> float:
    row = work.row
    start_s = min(record.sent_s for record in records)
    steps = merge_streams((record.event_s for record in records), start_s=start_s)
    if row.kind == "prefill":
        return compute_prefill_rate(steps, row.num_streams, row.prompt_tokens)
    return compute_decode_rate(steps, row.num_streams)

"""What is measured: the rows of the table, what each must reach, and the prompts they send.

    decode   output tok/s from the first step after all streams have a token to the step in which
             the first stream ends; 128 prompt tokens, 64 output tokens, forced, greedy
    quantised  the same from the model's own quantised file: Forerun in its int8 mode and llama.cpp,
             beside every peer's bf16 figure of the decode row just before (which it brings along)
    prefill  prompt tok/s; 64 prompts of 128 tokens, or one of 4,096
    serve    output tok/s end to end over HTTP, evaluation prompts, up to 128 tokens, greedy

Prompts of token ids are windows of the evaluation set's stories, another place in every block, so
that they are text and no cache knows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.errors import ConfigError, describe_unknown_key

OURS, LLAMA_CPP = "forerun", "llama.cpp"
KINDS = ("decode", "quantised", "prefill", "serve")
# Who computes on the file as it is.
QUANTISED_PEERS = (OURS, LLAMA_CPP)
PROMPT_TOKENS = 128
DECODE_TOKENS = 64
SERVE_TOKENS = 128
PREFILLS = ((64, 128), (1, 4096))
# A peer reaches its steady state in a few waves; 192 is near all the evaluation prompts.
WAVES = 5
MIN_SERVE_PROMPTS, MAX_SERVE_PROMPTS = 8, 192
BLOCK_SHIFT = 37

# What Forerun must reach against the best peer.
_DECODE_BOUNDS = {
    "smollm2-135m-instruct": {1: 0.95, 4: 1.2, 16: 1.2, 64: 1.2},
    "qwen2.5-coder-0.5b-instruct": {1: 0.97, 4: 1.15, 16: 1.15, 64: 1.05},
}
_SERVE_BOUNDS = {4: 1.2, 16: 1.2, 64: 1.2}
# Quantised rows: against llama.cpp on the same file, or against the best peer in any precision.
SAME_FILE, ANY_PRECISION = "same_file", "any_precision"
_QUANTISED_BOUNDS = {
    "smollm2-135m-instruct": {
        1: (SAME_FILE, 2.2),
        4: (ANY_PRECISION, 1.5),
        16: (ANY_PRECISION, 1.5),
        64: (ANY_PRECISION, 1.5),
    },
    "qwen2.5-coder-0.5b-instruct": {
        1: (SAME_FILE, 1.3),
        4: (SAME_FILE, 1.5),
        16: (SAME_FILE, 1.5),
        64: (SAME_FILE, 1.5),
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table. `num_streams` prompts are sent at once (serve: at any time)."""

    kind: str
    num_streams: int
    prompt_tokens: int = PROMPT_TOKENS
    max_tokens: int = DECODE_TOKENS

    @property
    def name(self) -> str:
        """How tables and results call it."""
        if self.kind == "prefill":
            return f"prefill {self.num_streams} x {self.prompt_tokens}"
        return f"{self.kind} {self.num_streams}"

    @property
    def is_served(self) -> bool:
        """Whether it goes over HTTP."""
        return self.kind == "serve"

    @property
    def is_quantised(self) -> bool:
        """Whether it computes on the model's own file."""
        return self.kind == "quantised"

    def program_of(self, peer: str) -> str:
        """Return which program of a peer computes this row: Forerun has an engine per mode."""
        return f"{peer} int8" if self.is_quantised and peer == OURS else peer

    @property
    def num_prompts(self) -> int:
        """Prompts sent in one measurement."""
        if not self.is_served:
            return self.num_streams
        return max(MIN_SERVE_PROMPTS, min(MAX_SERVE_PROMPTS, WAVES * self.num_streams))


def build_rows(kinds: Sequence[str], streams: Sequence[int]) -> list[Row]:
    """Return the rows of some kinds in the order of a block; raises ConfigError for unknown ones.

    A quantised row follows the decode row it is compared with: the machine's speed drifts.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError(describe_unknown_key(kind, KINDS, kind="kind of row"))
    if any(count < 1 for count in streams):
        raise ConfigError(f"--streams must be numbers of at least 1, got {list(streams)}.")
    decoding = ["decode", "quantised"] if "quantised" in kinds else ["decode"]
    rows = []
    if set(decoding) & set(kinds):
        rows += [Row(kind=kind, num_streams=count) for count in streams for kind in decoding]
    if "prefill" in kinds:
        rows += [
            Row(kind="prefill", num_streams=count, prompt_tokens=length, max_tokens=1)
            for count, length in PREFILLS
        ]
    if "serve" in kinds:
        rows += [Row(kind="serve", num_streams=count, max_tokens=SERVE_TOKENS) for count in streams]
    return rows


def find_bound(model: str, row: Row) -> float | None:
    """Return the ratio to the best peer that a bf16 row must reach, or None."""
    if row.kind == "decode":
        return _DECODE_BOUNDS.get(model, {}).get(row.num_streams)
    if row.kind == "serve":
        return _SERVE_BOUNDS.get(row.num_streams)
    return 1.0 if row.kind == "prefill" else None


def find_quantised_bound(model: str, row: Row) -> tuple[str, float] | None:
    """Return against what a quantised row is judged, and the ratio it must reach; or None."""
    return _QUANTISED_BOUNDS.get(model, {}).get(row.num_streams)


def cut_prompts(token_ids: Sequence[int], row: Row, block: int) -> list[list[int]]:
    """Return a row's prompts: neighbouring windows of a text, its end joined to its start."""
    length = row.prompt_tokens
    start = block * BLOCK_SHIFT
    return [
        [token_ids[(start + index * length + offset) % len(token_ids)] for offset in range(length)]
        for index in range(row.num_streams)
    ]

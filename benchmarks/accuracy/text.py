"""The text that is read: prompts of four kinds from several sources, cut into windows.

Texts of a kind are joined by blank lines and cut into windows of equal length, so no long document
dominates and every context length up to the window counts alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.data import build_prompt_set
from forerun.tokenization import Tokenizer

# What each kind of text is, and the category of prompts it stands in.
KINDS = {
    "prose": "stories of CoQA",
    "code": "functions of HumanEval",
    "maths": "questions of GSM8K",
    "chat": "first turns of MT-Bench",
}
_CATEGORIES = {"prose": "summarise", "code": "code", "maths": "math", "chat": "chat"}
PROMPT_SETS = ("evaluation", "small")
# A shorter rest of a kind's text is left out.
MIN_WINDOW = 32


@dataclass(frozen=True, slots=True)
class Window:
    """Neighbouring tokens of one kind of text; each but the first is predicted."""

    kind: str
    token_ids: list[int]

    @property
    def num_scored(self) -> int:
        """Tokens that are predicted."""
        return len(self.token_ids) - 1


def build_windows(tokenizer: Tokenizer, *, tokens_per_kind: int, length: int) -> list[Window]:
    """Return the windows of every kind, each kind cut off after `tokens_per_kind`."""
    texts = read_texts()
    return [
        Window(kind, token_ids)
        for kind in KINDS
        for token_ids in cut_windows(
            tokenizer.encode("\n\n".join(texts[kind]))[:tokens_per_kind], length
        )
    ]


def read_texts() -> dict[str, list[str]]:
    """Return the texts of every kind, from all prompt sets."""
    sources = [source for name in PROMPT_SETS for source in build_prompt_set(name)]
    return {
        kind: [s["messages"][-1]["content"] for s in sources if s["category"] == category]
        for kind, category in _CATEGORIES.items()
    }


def cut_windows(token_ids: Sequence[int], length: int) -> list[list[int]]:
    """Return neighbouring windows; the last one may be shorter, down to MIN_WINDOW."""
    windows = [list(token_ids[i : i + length]) for i in range(0, len(token_ids), length)]
    return [window for window in windows if len(window) >= MIN_WINDOW]


def count_tokens(windows: Sequence[Window]) -> dict[str, int]:
    """Return how many tokens of each kind are predicted."""
    counts = dict.fromkeys(KINDS, 0)
    for window in windows:
        counts[window.kind] += window.num_scored
    return counts


def read_code_prompts(count: int) -> list[list[dict[str, str]]]:
    """Return up to `count` conversations that ask for a function to be completed."""
    sources = build_prompt_set(PROMPT_SETS[0])
    return [s["messages"] for s in sources if s["category"] == _CATEGORIES["code"]][:count]

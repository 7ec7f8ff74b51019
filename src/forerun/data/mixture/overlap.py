"""Keeps training prompts apart from evaluation prompts: same text, or runs of words in common."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

NGRAM_WORDS = 8
# Runs that stand in this many evaluation texts are phrasing ("how much money does she have"), not
# content.
_COMMON_TEXTS = 5
MAX_SHARED = 0.1


def normalise(text: str) -> str:
    """Return the words and numbers of a text in lower case."""
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def list_ngrams(text: str) -> Iterator[str]:
    """Yield every run of eight words of a text; a shorter text is one run."""
    words = normalise(text).split(" ")
    for start in range(max(1, len(words) - NGRAM_WORDS + 1)):
        yield " ".join(words[start : start + NGRAM_WORDS])


class OverlapFilter:
    """Knows the evaluation texts and tells which prompts are too close to one of them."""

    def __init__(self, texts: Iterable[str]) -> None:
        counts = Counter(ngram for text in texts for ngram in set(list_ngrams(text)))
        self._ngrams = {ngram for ngram, count in counts.items() if count < _COMMON_TEXTS}

    def compute_shared(self, text: str) -> float:
        """Return the share of a prompt's runs of words that evaluation texts contain."""
        ngrams = list(list_ngrams(text))
        return sum(ngram in self._ngrams for ngram in ngrams) / len(ngrams)

    def is_apart(self, text: str) -> bool:
        """Whether a prompt may be trained on."""
        return self.compute_shared(text) <= MAX_SHARED

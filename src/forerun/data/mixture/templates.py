"""Sentences with gaps: words from named lists and whole numbers from ranges.

A gap is {list}, {list2} for another word of the same list, {a:3-12} for a number, or {a:20-90/10}
for a multiple of ten. The first gap of a name chooses, later ones repeat the choice.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence

_GAP = re.compile(r"\{([a-z]+)(\d*)(?::(\d+)-(\d+)(?:/(\d+))?)?\}")

Words = Mapping[str, Sequence[str]]


def split_words(text: str) -> list[str]:
    """Return the words of a list written with commas."""
    return [word.strip() for word in text.split(",")]


def fill_template(template: str, words: Words, rng: random.Random) -> str:
    """Return the template with every gap filled."""
    chosen: dict[str, str] = {}

    def fill(match: re.Match[str]) -> str:
        name = match[1] + match[2]
        if name not in chosen:
            chosen[name] = _choose(match, words, set(chosen.values()), rng)
        return chosen[name]

    return _GAP.sub(fill, template)


def _choose(match: re.Match[str], words: Words, taken: set[str], rng: random.Random) -> str:
    if match[3]:
        step = int(match[5] or 1)
        return str(rng.randrange(int(match[3]), int(match[4]) + 1, step))
    while (word := rng.choice(words[match[1]])) in taken:
        pass
    return word

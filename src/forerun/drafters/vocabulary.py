"""Whether two tokenizers mean the same by every id: what a draft model must have in common.

Compared are the spelling of every id, and the ids of a few texts. Which ids end a text or count as
special may differ: a draft is only ever a guess.
"""

from __future__ import annotations

from forerun.errors import ConfigError
from forerun.tokenization import Tokenizer

PROBES = ("Hello, world!", "def f(x):\n    return x + 1\n", "1234.5 \u00e9\u4e16 \U0001f600")
_ADVICE = "a draft model needs the target's own vocabulary; choose one of the same family."


def check_vocab_size(target: int, drafter: int) -> None:
    """Raise ConfigError unless both models have logits over as many tokens."""
    if target != drafter:
        raise ConfigError(
            f"the draft model computes logits of {drafter} tokens, the target of {target}; "
            f"{_ADVICE}"
        )


def check_same_vocabulary(target: Tokenizer, drafter: Tokenizer) -> None:
    """Raise ConfigError that says what differs first."""
    if target.vocab_size != drafter.vocab_size:
        raise ConfigError(
            f"the draft model's tokenizer has {drafter.vocab_size} tokens, the target's "
            f"{target.vocab_size}; {_ADVICE}"
        )
    for token_id in range(target.vocab_size):
        wanted, given = target.id_to_token(token_id), drafter.id_to_token(token_id)
        if wanted != given:
            raise ConfigError(
                f"token {token_id} is {given!r} for the draft model and {wanted!r} for the target; "
                f"{_ADVICE}"
            )
    for probe in PROBES:
        texts = [t.encode(probe, add_special_tokens=False) for t in (target, drafter)]
        if texts[0] != texts[1]:
            raise ConfigError(
                f"draft model and target split {probe!r} differently ({texts[1]} and {texts[0]}); "
                f"{_ADVICE}"
            )

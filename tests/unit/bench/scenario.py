"""One load whose every figure can be computed by hand: two places, four requests.

r0  sent 0.0  0.5: 1 token, 0.7: 3 tokens, 1.5: 1 token (a stall), usage in the last event
r1  sent 0.0  1.0: 1 token, 1.1: two events of 2 tokens in one read (a burst)
r2  sent 1.1  3.1: 2 tokens (a late first token), 3.5: 2 tokens
r3  sent 1.5  1.6: 1 token, 1.8: the server hangs up
"""

from __future__ import annotations

from unit.bench.scripted_server import Script, as_event, make_event

USAGE = {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4}}
SPECULATION = {
    "num_spec_steps": 4,
    "num_draft_tokens": 8,
    "num_verified_tokens": 6,
    "num_accepted_draft_tokens": 3,
    "acceptance_histogram": [2, 1, 1],
}


def make_last_event(completion_tokens: int) -> bytes:
    return as_event(
        {
            "choices": [],
            "usage": USAGE | {"completion_tokens": completion_tokens},
            "metrics": {"speculative_decoding": SPECULATION},
        }
    )


SCRIPTS = [
    Script.of_events(
        (0.5, make_event(1)),
        (0.7, make_event(3)),
        (1.5, make_event(1, finish_reason="stop") + make_last_event(5)),
    ),
    Script.of_events(
        (1.0, make_event(1)),
        (1.1, make_event(2) + make_event(2, finish_reason="length") + make_last_event(5)),
    ),
    Script.of_events(
        (2.0, make_event(2)),
        (2.4, make_event(2, finish_reason="stop") + make_last_event(4)),
    ),
    Script([*Script.of_events((0.1, make_event(1)), ends=False).steps, (0.3, b"")]),
]
CONCURRENCY = 2

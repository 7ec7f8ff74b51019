"""The synthetic drafter always drafts what it is asked for, from the request's own tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fakes import collect_tokens, drain, new_request
from forerun.core import SamplingParams
from forerun.drafters.synthetic import SyntheticDrafter
from forerun.plan import DraftRequest
from model_engines import make_model, make_model_engine


@given(st.lists(st.integers(0, 99), min_size=1, max_size=12), st.integers(1, 8))
def test_full_depth_from_known_tokens(tokens: list[int], depth: int) -> None:
    request = DraftRequest(
        request_id="r",
        generation=0,
        token_ids=tokens,
        depth=depth,
        block_table=[],
        params=SamplingParams(),
        seed=0,
        choice_index=0,
        num_draws=0,
    )
    (drafts,) = SyntheticDrafter(max_speculative_tokens=8).propose([request]).draft_token_ids
    assert len(drafts) == depth
    assert set(drafts) <= set(tokens)


def test_an_engine_with_certain_acceptance_commits_full_blocks() -> None:
    config = {
        "method": "synthetic",
        "num_speculative_tokens": 3,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [1.0, 1.0, 0.0],
    }
    engine = make_model_engine(make_model(), speculative_config=config)
    engine.add(new_request("r", [1, 2, 3], temperature=0.0, max_tokens=22))
    outputs = drain(engine)
    assert len(collect_tokens(outputs)["r", 0]) == 22
    assert set(outputs[-1].spec_stats.accepted_per_step) == {2}

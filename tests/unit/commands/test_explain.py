"""The lines of `forerun generate --explain`."""

from __future__ import annotations

import io

from fakes import (
    ByteTokenizer,
    PrefixCheckingRunner,
    count_up,
    draft_right,
    drain,
    make_engine,
    new_request,
)
from forerun.commands.explain import StepExplainer
from forerun.engine.trace import RequestTrace, StepTrace


def explain(trace: StepTrace) -> str:
    stream = io.StringIO()
    StepExplainer(ByteTokenizer(), stream).write(trace)
    return stream.getvalue()


def test_a_line_says_what_was_expected_and_what_came() -> None:
    request = RequestTrace(
        request_id="r",
        draft_token_ids=[104, 105, 106],
        survival=[0.93, 0.7, 1.0],
        num_admitted=2,
        num_accepted=1,
        emitted_token_ids=[104, 33],
    )
    trace = StepTrace(
        step=12,
        num_rows=3,
        requests=[request],
        predicted_ms=5.04,
        measured_ms=4.81,
        state="drafting_does_not_pay",
    )
    text = explain(trace)
    assert text == (
        "step 12     rows 3     survival .93 .70 1.00   B 2 of 3   accepted 1   "
        "5.0 ms expected, 4.8 taken   drafting does not pay   'h!'\n"
    )


def test_without_a_cost_model_only_the_time_taken_is_told() -> None:
    request = RequestTrace(
        request_id="r", draft_token_ids=[], survival=[], num_admitted=0, emitted_token_ids=[65]
    )
    text = explain(StepTrace(step=1, num_rows=9, requests=[request], measured_ms=2.0))
    assert text == "step 1      rows 9     no drafts   2.0 ms   'A'\n"


def test_every_step_of_an_engine_is_traced_as_it_was() -> None:
    runner = PrefixCheckingRunner(count_up, draft=draft_right(count_up, 2))
    engine = make_engine(runner, num_speculative_tokens=4)
    traces: list[StepTrace] = []
    engine.on_trace = traces.append
    engine.add(new_request("a", [1, 2, 3], max_tokens=10))
    outputs = drain(engine)
    emitted = [token for trace in traces for r in trace.requests for token in r.emitted_token_ids]
    told = [token for output in outputs for token in output.token_ids]
    assert emitted[: len(told)] == told
    drafted = [r for trace in traces for r in trace.requests if r.draft_token_ids]
    assert drafted
    assert all(r.num_admitted == len(r.draft_token_ids) for r in drafted)
    assert {r.num_accepted for r in drafted} == {2}

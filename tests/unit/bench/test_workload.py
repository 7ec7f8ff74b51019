"""Data sets, their errors, and arrival times."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from forerun.bench import workload
from forerun.bench.options import BenchConfig
from forerun.bench.workload import build_arrivals, build_warmup_rows, build_workload, parse_rows
from forerun.errors import ConfigError


def test_the_small_set_comes_with_the_package() -> None:
    rows = build_workload(BenchConfig())
    assert {row.category for row in rows} >= {"chat", "code", "math", "summarise"}
    assert len({row.row_id for row in rows}) == len(rows) >= 20
    assert all(row.is_chat and row.max_tokens == 128 for row in rows)


def test_the_seed_decides_the_order_and_nothing_else() -> None:
    first, again, other = (build_workload(BenchConfig(seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert sorted(row.row_id for row in first) == sorted(row.row_id for row in other)
    kept = build_workload(BenchConfig(disable_shuffle=True))
    assert [row.row_id for row in kept][:2] == ["chat-1", "chat-2"]


def test_rows_go_round_with_new_names_or_not_at_all() -> None:
    count = len(build_workload(BenchConfig()))
    rows = build_workload(BenchConfig(num_prompts=count + 1))
    assert rows[-1].row_id == f"{rows[0].row_id}#1"
    assert rows[-1].prompt == rows[0].prompt
    with pytest.raises(ConfigError, match=f"has {count} rows"):
        build_workload(BenchConfig(num_prompts=count + 1, oversample=False))


def test_random_rows_are_token_ids_of_the_lengths_asked_for() -> None:
    config = BenchConfig(
        dataset_name="random", num_prompts=3, random_input_len=50, random_output_len=7
    )
    rows = build_workload(config)
    assert [len(row.prompt) for row in rows] == [50, 50, 50]
    assert all(isinstance(i, int) for row in rows for i in row.prompt)
    assert {row.max_tokens for row in rows} == {7}
    assert rows == build_workload(config)
    assert len({tuple(map(str, row.prompt)) for row in rows}) == 3


def test_the_evaluation_set_is_read_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    source = {"id": "gsm8k-1", "category": "math", "messages": [{"role": "user", "content": "2+2"}]}
    monkeypatch.setattr(workload, "build_prompt_set", lambda name, _progress: [source])
    (row,) = build_workload(BenchConfig(dataset_name="evaluation"))
    assert (row.row_id, row.category, row.is_chat) == ("gsm8k-1", "math", True)


def test_custom_rows_may_be_texts_ids_or_messages(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"prompt": "Hi", "output_tokens": 5}\n\n{"prompt": [1, 2], "max_tokens": 6, "id": "b"}\n'
    )
    config = BenchConfig(dataset_name="custom", dataset_path=str(path), disable_shuffle=True)
    first, second = build_workload(config)
    assert (first.row_id, first.prompt, first.max_tokens) == ("row-1", "Hi", 5)
    assert (second.row_id, second.prompt, second.is_chat) == ("b", [1, 2], False)


def test_an_output_length_given_by_hand_wins() -> None:
    assert {row.max_tokens for row in build_workload(BenchConfig(custom_output_len=9))} == {9}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Expecting property name"),
        ("3", "must be a JSON object"),
        ("{}", "either prompt or messages"),
        ('{"prompt": "a", "messages": []}', "either prompt or messages"),
        ('{"prompt": ""}', "not empty"),
        ('{"prompt": [1, "a"]}', "list of token ids"),
        ('{"messages": [{"role": "user"}]}', "role and content"),
        ('{"prompt": "a", "max_tokens": 0}', "above 0, got 0"),
    ],
)
def test_a_bad_row_is_named_by_its_line(line: str, reason: str) -> None:
    with pytest.raises(ConfigError, match="rows.jsonl, line 2: ") as caught:
        parse_rows('{"prompt": "fine"}\n' + line, "rows.jsonl")
    assert reason in str(caught.value)


def test_an_empty_or_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no rows"):
        parse_rows("\n\n", "empty.jsonl")
    config = BenchConfig(dataset_name="custom", dataset_path=str(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match=r"cannot read the data set .*No such file"):
        build_workload(config)


def test_warm_up_prompts_share_no_prefix_with_the_run() -> None:
    text = parse_rows('{"prompt": "Hi"}\n{"prompt": [5, 6]}', "x")
    chat = parse_rows('{"messages": [{"role": "user", "content": "Hi"}]}', "x")
    assert [row.prompt for row in build_warmup_rows(text, 3)] == ["(0) Hi", [1001, 6], "(2) Hi"]
    assert build_warmup_rows(chat, 1)[0].prompt == [{"role": "user", "content": "(0) Hi"}]


def test_poisson_arrivals_have_the_rate_and_repeat() -> None:
    arrivals = build_arrivals(4000, 8.0, seed=3)
    assert arrivals == build_arrivals(4000, 8.0, seed=3)
    assert arrivals[0] == 0.0
    gaps = [after - before for before, after in zip(arrivals, arrivals[1:], strict=False)]
    mean = sum(gaps) / len(gaps)
    # Exponential gaps: mean and deviation are both 1 / rate; 4000 of them are within 5 %.
    assert mean == pytest.approx(1 / 8, rel=0.05)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert deviation == pytest.approx(1 / 8, rel=0.1)


def test_an_unlimited_rate_means_all_at_once() -> None:
    assert build_arrivals(3, math.inf, seed=0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_url": "localhost:8000"}, "must start with http"),
        ({"backend": "vllm"}, "unknown backend"),
        ({"dataset_name": "smal"}, "did you mean 'small'"),
        ({"dataset_name": "custom"}, "belongs to --dataset-name custom"),
        ({"dataset_path": "x"}, "belongs to --dataset-name custom"),
        ({"num_prompts": 0}, "--num-prompts must be at least 1"),
        ({"request_rate": 0.0}, "--request-rate must be above 0"),
        ({"num_warmups": -1}, "--num-warmups must be at least 0"),
        ({"metric_percentiles": "50,x"}, "must be numbers in 0..100"),
        ({"percentile_metrics": "ttf"}, "did you mean 'ttft'"),
        ({"extra_body": "[1]"}, "must be a JSON object"),
        ({"extra_body": "{"}, "not valid JSON"),
    ],
)
def test_bad_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BenchConfig(**options)

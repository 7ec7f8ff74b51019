"""Logprobs are of the raw distribution, at every verify row and every chunk of a prompt."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch

from fakes import draft_right, drain, new_request
from forerun.core import RequestOutput, TokenLogprobs
from model_engines import compute_last_logits, make_model, make_model_engine
from scripted_drafters import ScriptedDrafter

MODEL = make_model(seed=2)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]


@functools.cache
def compute_law(prefix: tuple[int, ...]) -> torch.Tensor:
    return torch.log_softmax(compute_last_logits(MODEL, prefix), -1)


def next_token(prefix: Sequence[int]) -> int:
    return int(compute_law(tuple(prefix)).argmax())


def check_entry(entry: TokenLogprobs, prefix: Sequence[int], token: int, num_top: int) -> None:
    law = compute_law(tuple(prefix))
    assert entry.token_id == token
    assert entry.logprob == pytest.approx(float(law[token]), abs=1e-4)
    assert entry.rank == 1 + int((law > law[token]).sum())
    assert [t for t, _ in entry.top] == law.topk(num_top).indices.tolist()
    for top_token, logprob in entry.top:
        assert logprob == pytest.approx(float(law[top_token]), abs=1e-4)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"seed": 1, "temperature": 0.7, "top_p": 0.5},
        {"temperature": 0.0, "repetition_penalty": 1.5, "presence_penalty": 1.0},
        {"temperature": 1.0, "logit_bias": ((7, 5.0),)},
    ],
)
def test_output_logprobs_ignore_processors_and_follow_each_row(params: dict) -> None:
    drafter = ScriptedDrafter(draft_right(next_token, 2))
    engine = make_model_engine(MODEL, drafter=drafter)
    engine.add(new_request("r", PROMPT, max_tokens=24, logprobs=3, **params))
    engine.add(new_request("other", [1, 2], max_tokens=24, temperature=0.0))
    outputs = [output for output in drain(engine) if output.request_id == "r"]
    tokens = [token for output in outputs for token in output.token_ids]
    entries = [entry for output in outputs for entry in output.logprobs]
    assert len(entries) == len(tokens) == 24
    for index, (entry, token) in enumerate(zip(entries, tokens, strict=True)):
        check_entry(entry, PROMPT + tokens[:index], token, 3)


def collect_prompt_logprobs(outputs: Sequence[RequestOutput]) -> list[TokenLogprobs | None]:
    return [entry for output in outputs for entry in output.prompt_logprobs or []]


@pytest.mark.parametrize("rows", [4, 7, 64])
def test_prompt_logprobs_across_chunks(rows: int) -> None:
    engine = make_model_engine(MODEL, max_num_batched_tokens=rows, max_num_seqs=4)
    engine.add(new_request("warm", PROMPT, max_tokens=1))
    drain(engine)
    engine.add(new_request("r", PROMPT, max_tokens=2, prompt_logprobs=2))
    outputs = drain(engine)
    entries = collect_prompt_logprobs(outputs)
    assert outputs[-1].num_cached_tokens == 0, "prompt logprobs bypass the prefix cache"
    assert entries[0] is None
    assert len(entries) == len(PROMPT)
    for index, entry in enumerate(entries[1:], start=1):
        check_entry(entry, PROMPT[:index], PROMPT[index], 2)


def test_prompt_logprobs_are_emitted_once_despite_preemption() -> None:
    engine = make_model_engine(MODEL, num_blocks=12, max_num_batched_tokens=8, max_num_seqs=4)
    for name in ("a", "b"):
        engine.add(new_request(name, PROMPT, max_tokens=20, prompt_logprobs=0, temperature=0.0))
    outputs = drain(engine)
    assert engine.scheduler.num_preemptions > 0
    for name in ("a", "b"):
        mine = [output for output in outputs if output.request_id == name]
        entries = collect_prompt_logprobs(mine)
        assert [entry and entry.token_id for entry in entries] == [None, *PROMPT[1:]]

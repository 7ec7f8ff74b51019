"""Blocks over the paged pool equal the training network's, whatever was computed and when."""

from __future__ import annotations

import random

import pytest
import torch

from block_drafters import Bench, make_config, make_drafter, make_network, make_target
from forerun import kernels
from forerun.core import SamplingParams
from forerun.drafters.dspark.config import DSparkConfig
from forerun.drafters.dspark.network import DSparkNetwork

TARGET = make_target()
CONFIGS = {
    "dspark": make_config(),
    "dspark_full_vocab": make_config(draft_vocab_size=257),
    "dspark_rnn": make_config(markov_head_type="rnn"),
    "dspark_gated": make_config(markov_head_type="gated", confidence_with_markov=False),
    "dflash": make_config("dflash"),
    "dflash_legacy": make_config("dflash", sample_from_anchor=False),
}
PATHS = ["native", "torch_ref", "pytorch"]


def build(
    config: DSparkConfig, backend: str = "torch_ref", **options: object
) -> tuple[DSparkNetwork, Bench]:
    network = make_network(config, TARGET)
    return network, Bench(TARGET, make_drafter(network, **options), backend=backend)


@pytest.fixture(params=PATHS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The attention to use; "pytorch" stands for a machine without kernels."""
    if request.param == "pytorch":
        monkeypatch.setattr(kernels, "_probe", lambda: (None, "switched off"))
        return "torch_ref"
    if request.param == "native" and kernels.find_kernels() is None:
        pytest.skip(f"no native kernels: {kernels.explain_kernels()}")
    return str(request.param)


def make_tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(257), k=count)


@pytest.mark.parametrize("name", CONFIGS)
def test_blocks_equal_the_training_forward(name: str, backend: str) -> None:
    """Several requests of different length and depth in one pass; fp32, to 1e-4."""
    network, bench = build(CONFIGS[name], backend)
    tokens = [make_tokens(length, seed=length) for length in (2, 9, 33, 70)]
    bench.compute(*((place, own[:-1], 0) for place, own in enumerate(tokens)))
    requests = [
        bench.ask(own, place=place, depth=depth)
        for place, (own, depth) in enumerate(zip(tokens, (5, 1, 3, 5), strict=True))
    ]
    hidden, logits = bench.run_drafter(requests)
    expected = bench.run_reference(network, requests)
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)
    expected_logits = network.compute_base_logits(expected)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-4)


def draft_by_reference(
    network: DSparkNetwork, hidden: torch.Tensor, anchor: int
) -> tuple[list[int], list[float]]:
    """Return the greedy tokens of one block and their confidences, in plain torch."""
    token_ids, confidence = [], []
    previous = torch.tensor([anchor])
    state = network.markov_head.start(1) if network.markov_head else None
    for slot in hidden:
        logits = network.compute_base_logits(slot[None])
        embedding = None
        if network.markov_head is not None:
            embedding = network.markov_head.embed(previous)
            bias, state = network.markov_head.step(previous, slot[None], state)
            logits = logits + bias
        if network.confidence_head is not None:
            confidence.append(float(network.confidence_head(slot[None], embedding).sigmoid()))
        previous = network.d2t[logits.argmax(-1)]
        token_ids.append(int(previous))
    return token_ids, confidence


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_greedy_drafts_and_confidences_follow_the_heads(name: str, backend: str) -> None:
    network, bench = build(CONFIGS[name], backend)
    tokens = [make_tokens(20, seed) for seed in range(4)]
    bench.compute(*((place, own[:-1], 0) for place, own in enumerate(tokens)))
    depths = (5, 2, 5, 1)
    requests = [
        bench.ask(own, place=place, depth=depths[place]) for place, own in enumerate(tokens)
    ]
    proposal = bench.drafter.propose(requests)
    assert proposal.draft_probs == [None] * 4
    for place, request in enumerate(requests):
        hidden = bench.run_reference(network, [request])
        token_ids, confidence = draft_by_reference(network, hidden, request.token_ids[-1])
        assert proposal.draft_token_ids[place] == token_ids
        if network.confidence_head is not None:
            assert proposal.confidence[place] == pytest.approx(confidence, abs=1e-4)
        else:
            assert proposal.confidence is None
            assert len(proposal.evidence[place]) == depths[place]


@pytest.mark.parametrize("name", ["dspark", "dspark_rnn", "dflash_legacy"])
def test_drafts_after_any_acceptance_equal_those_from_scratch(name: str, backend: str) -> None:
    """Rounds of drafting, verifying any number of drafts and accepting any part of them."""
    rng = random.Random(3)
    network, bench = build(CONFIGS[name], backend)
    tokens = make_tokens(11)
    bench.compute((0, tokens[:-1], 0))
    for _ in range(12):
        request = bench.ask(tokens, depth=rng.randint(1, 5))
        drafts = bench.drafter.propose([request]).draft_token_ids[0]
        _, fresh = build(CONFIGS[name], backend)
        fresh.compute((0, tokens[:-1], 0))
        hidden, _ = bench.run_drafter([request])
        torch.testing.assert_close(hidden, fresh.run_drafter([request])[0], rtol=1e-4, atol=1e-4)
        assert fresh.drafter.propose([request]).draft_token_ids[0] == drafts
        num_verified = rng.randint(0, len(drafts))
        num_accepted = rng.randint(0, num_verified)
        bench.compute((0, [*tokens, *drafts[:num_verified]], len(tokens) - 1))
        tokens = [*tokens, *drafts[:num_accepted], rng.randrange(257)]


def test_ingest_in_pieces_is_ingest_at_once(backend: str) -> None:
    network, whole = build(CONFIGS["dspark"], backend)
    _, pieces = build(CONFIGS["dspark"], backend)
    tokens = make_tokens(41)
    whole.compute((0, tokens[:-1], 0))
    for start, stop in ((0, 7), (7, 8), (8, 30), (30, 40)):
        pieces.compute((0, tokens[:stop], start))
    request = whole.ask(tokens)
    torch.testing.assert_close(
        pieces.run_drafter([request])[0], whole.run_drafter([request])[0], rtol=1e-4, atol=1e-4
    )


def test_drafting_leaves_the_targets_layers_and_the_context_alone() -> None:
    _, bench = build(CONFIGS["dspark"])
    tokens = make_tokens(10)
    bench.compute((0, tokens[:-1], 0))
    before = [pool.clone() for pool in (*bench.store.keys, *bench.store.values)]
    bench.drafter.propose([bench.ask(tokens)])
    after = [*bench.store.keys, *bench.store.values]
    num_layers, in_all = TARGET.spec.num_layers, len(bench.store.keys)
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        assert torch.equal(old[:3], new[:3]), "positions 0 to 7"
        assert torch.equal(old, new) == (index % in_all < num_layers)


def test_blocks_of_an_int8_pool_are_close_to_exact(backend: str) -> None:
    network = make_network(CONFIGS["dspark"], TARGET)
    bench = Bench(TARGET, make_drafter(network), backend=backend, kv_dtype=torch.int8)
    tokens = make_tokens(37)
    bench.compute((0, tokens[:-1], 0))
    request = bench.ask(tokens)
    hidden, _ = bench.run_drafter([request])
    expected = bench.run_reference(network, [request])
    assert float((hidden - expected).abs().mean()) < 0.02
    assert not torch.equal(hidden, expected)


def test_nothing_is_drafted_beyond_the_drafters_context() -> None:
    for name, shorter in (("dspark", 0), ("dflash_legacy", 1)):
        config = make_config(
            "dspark" if name == "dspark" else "dflash",
            sample_from_anchor=name == "dspark",
            max_model_len=12,
        )
        _, bench = build(config)
        tokens = [make_tokens(length) for length in (8, 10, 12, 13)]
        bench.compute(*((place, own[:-1], 0) for place, own in enumerate(tokens)))
        proposal = bench.drafter.propose([bench.ask(t, place=p) for p, t in enumerate(tokens)])
        lengths = [len(drafts) for drafts in proposal.draft_token_ids]
        assert lengths == [5 - shorter, 3 - shorter, 1 - shorter, 0]


def test_requests_of_every_kind_draft_as_they_do_alone() -> None:
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=11, temperature=0.9, top_k=20),
        SamplingParams(temperature=0.8),
    ]
    _, bench = build(CONFIGS["dspark"])
    tokens = [make_tokens(12, seed) for seed in range(6)]
    bench.compute(*((place, own[:-1], 0) for place, own in enumerate(tokens)))
    requests = [
        bench.ask(own, place=place, params=kinds[place % 3], depth=1 + place % 5, seed=place)
        for place, own in enumerate(tokens)
    ]
    together = bench.drafter.propose(requests)
    for place, request in enumerate(requests):
        alone = bench.drafter.propose([request])
        assert together.draft_token_ids[place] == alone.draft_token_ids[0]
        assert len(alone.draft_token_ids[0]) == request.depth
        assert together.confidence[place] == pytest.approx(alone.confidence[0], abs=1e-4)

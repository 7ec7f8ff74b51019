"""Block drafters in the whole engine: text never changes, and drafts know only what is committed.

The target has so few tokens that random drafters are right now and then.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch

from block_drafters import (
    BLOCK_SIZE,
    Bench,
    make_config,
    make_drafter,
    make_network,
    make_target,
)
from budgets import make_profile
from fakes import collect_tokens, drain, new_request
from forerun.core import RequestOutput, SamplingParams
from forerun.drafters.base import DraftProposal
from forerun.drafters.dspark.drafter import DSparkDrafter
from forerun.engine.engine import Engine
from forerun.kernels import find_kernels
from forerun.plan import DraftRequest
from model_engines import make_model_engine

VOCAB = 11
TARGET = make_target(vocab_size=VOCAB, seed=4)
SIZES = {"vocab_size": VOCAB, "draft_vocab_size": 8, "intermediate_size": 48}
CONFIGS = {
    "dspark": make_config(**SIZES),
    "dspark_rnn": make_config(**SIZES, markov_head_type="rnn"),
    "dflash": make_config("dflash", **SIZES),
    "dflash_legacy": make_config("dflash", **SIZES, sample_from_anchor=False),
}
NETWORKS = {name: make_network(config, TARGET, seed=1) for name, config in CONFIGS.items()}
PROMPTS = [[1, 2, 3, 1, 2], [7] * 9, list(range(11)) * 3, [5], [2, 9] * 8, [4, 4, 1]]
ROWS = [1, 6, 12, 18, 36]
STAIRS = make_profile(
    ROWS,
    [1.0, 1.0, 1.1, 1.6, 2.5],
    draft_requests=[1, 6],
    draft_first_ms=[0.05, 0.1],
    draft_next_ms=[0.01, 0.02],
)
BACKENDS = ["torch_ref", *(["native"] if find_kernels() is not None else [])]


class NotingDrafter(DSparkDrafter):
    """Notes the drafts and confidences of every prefix it is asked about."""

    @classmethod
    def wrap(cls, drafter: DSparkDrafter) -> NotingDrafter:
        drafter.__class__ = cls
        drafter.notes = {}
        return drafter

    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        proposal = super().propose(requests)
        for index, request in enumerate(requests):
            scores = (proposal.confidence or proposal.evidence)[index]
            key = (tuple(request.token_ids), request.depth)
            self.notes[key] = (proposal.draft_token_ids[index], scores)
        return proposal


def run(
    name: str,
    params: dict,
    *,
    depth: int = BLOCK_SIZE,
    is_adaptive: bool = False,
    **options: object,
) -> tuple[list[RequestOutput], Engine, dict]:
    """Return the outputs of all prompts, the engine, and what was drafted after which prefix."""
    config = {"method": "ngram", "num_speculative_tokens": depth}
    if is_adaptive:
        config["enable_adaptive_verification"] = True
        options["profile"] = STAIRS
    drafter = None
    if name == "none":
        config = {"method": "none"}
    else:
        drafter = NotingDrafter.wrap(make_drafter(NETWORKS[name], depth=depth))
    engine = make_model_engine(TARGET, drafter=drafter, speculative_config=config, **options)
    for index, prompt in enumerate(PROMPTS):
        given = {"max_tokens": 40, **params}
        engine.add(new_request(f"r{index}", prompt, **given))
    return drain(engine), engine, {} if drafter is None else drafter.notes


@functools.cache
def answer_plainly(**params: object) -> dict[tuple[str, int], list[int]]:
    return collect_tokens(run("none", params)[0])


def count_accepted(outputs: Sequence[RequestOutput]) -> int:
    stats = [output.spec_stats for output in outputs if output.spec_stats is not None]
    return sum(s.num_accepted_tokens for s in stats)


@pytest.mark.parametrize("is_adaptive", [False, True])
@pytest.mark.parametrize("depth", range(1, BLOCK_SIZE + 1))
@pytest.mark.parametrize("name", NETWORKS)
def test_greedy_text_is_that_without_drafts(name: str, depth: int, is_adaptive: bool) -> None:
    params = {"temperature": 0.0}
    outputs, _, notes = run(name, params, depth=depth, is_adaptive=is_adaptive)
    assert collect_tokens(outputs) == answer_plainly(**params)
    # What a random head predicts need not be worth verifying.
    assert count_accepted(outputs) > 0 or (is_adaptive and notes)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
def test_greedy_text_on_every_backend_and_pool(backend: str, kv_dtype: torch.dtype) -> None:
    options = {"backend": backend, "kv_dtype": kv_dtype}
    outputs, _, _ = run("dspark", {"temperature": 0.0}, **options)
    plain, _, _ = run("none", {"temperature": 0.0}, **options)
    assert collect_tokens(outputs) == collect_tokens(plain)
    assert count_accepted(outputs) > 0


@pytest.mark.parametrize(
    "params", [{"seed": 3}, {"seed": 4, "top_p": 0.8, "temperature": 0.7, "n": 3}]
)
@pytest.mark.parametrize("name", NETWORKS)
def test_seeded_text_is_that_without_drafts(name: str, params: dict) -> None:
    outputs, _, _ = run(name, params)
    assert collect_tokens(outputs) == answer_plainly(**params)
    assert count_accepted(outputs) > 0


def compare_notes(some: dict, others: dict) -> int:
    """Return how many prefixes both were asked about; the drafts after them must be equal."""
    common = some.keys() & others.keys()
    for key in common:
        assert some[key][0] == others[key][0], key
        assert some[key][1] == pytest.approx(others[key][1], abs=1e-4), key
    return len(common)


@pytest.mark.parametrize("name", ["dspark", "dflash_legacy"])
def test_drafts_after_preemption_are_those_without(name: str) -> None:
    params = {"temperature": 0.0, "ignore_eos": True}
    outputs, engine, notes = run(name, params, num_blocks=40)
    _, roomy, expected = run(name, params)
    assert engine.scheduler.num_preemptions > 0 == roomy.scheduler.num_preemptions
    assert compare_notes(notes, expected) > 40
    assert count_accepted(outputs) > 0


@pytest.mark.parametrize("name", ["dspark", "dflash_legacy"])
def test_drafts_after_a_prefix_hit_are_those_without(name: str) -> None:
    network = NETWORKS[name]
    prompt = [1, 4, 9, 5, 3, 3, 7] * 6
    notes, cached = [], []
    for is_caching in (True, False):
        drafter = NotingDrafter.wrap(make_drafter(network))
        engine = make_model_engine(
            TARGET,
            drafter=drafter,
            speculative_config={"num_speculative_tokens": BLOCK_SIZE},
            enable_prefix_caching=is_caching,
        )
        engine.add(new_request("warm", prompt, temperature=0.0, max_tokens=1))
        drain(engine)
        engine.add(new_request("r", prompt, temperature=0.0, max_tokens=20))
        cached.append(drain(engine)[-1].num_cached_tokens)
        notes.append(drafter.notes)
    assert cached == [40, 0]
    assert notes[0].keys() == notes[1].keys()
    assert compare_notes(*notes) >= 5


def test_choices_that_share_a_prompt_draft_as_if_they_did_not() -> None:
    params = {"seed": 8, "n": 3, "max_tokens": 16}
    _, engine, notes = run("dspark", params)
    assert engine.scheduler.num_preemptions == 0
    _, _, alone = run("dspark", params, max_num_seqs=1, enable_prefix_caching=False)
    assert compare_notes(notes, alone) > 40


@pytest.fixture(scope="module")
def bench() -> Bench:
    bench = Bench(TARGET, make_drafter(NETWORKS["dspark"]))
    bench.compute((0, PROMPTS[2][:-1], 0))
    return bench


SAMPLED = SamplingParams(temperature=0.8)


def test_the_law_handed_over_is_the_one_drawn_from(bench: Bench) -> None:
    network = NETWORKS["dspark"]
    request = bench.ask(PROMPTS[2], params=SAMPLED)
    proposal = bench.drafter.propose([request])
    (drafts,), (probs,) = proposal.draft_token_ids, proposal.draft_probs
    assert probs.shape == (BLOCK_SIZE, VOCAB)
    assert probs.dtype == torch.float32
    outside = sorted(set(range(VOCAB)) - set(network.d2t.tolist()))
    assert len(outside) == 3
    assert not probs[:, outside].any()
    torch.testing.assert_close(probs.sum(1), torch.ones(BLOCK_SIZE))
    hidden = bench.run_reference(network, [request])
    with torch.inference_mode():
        previous = torch.tensor([[PROMPTS[2][-1], *drafts[:-1]]])
        logits = network.compute_base_logits(hidden)
        logits = logits + network.markov_head.bias_block(previous, hidden[None])[0]
    law = (logits / 0.8).softmax(-1)
    torch.testing.assert_close(probs[:, network.d2t], law, rtol=1e-4, atol=1e-5)
    assert all(probs[place, token] > 0 for place, token in enumerate(drafts))


def test_drawn_tokens_follow_q(bench: Bench) -> None:
    """The counts of 1,000 first draws are within 5 standard errors of q, token by token."""
    requests = [bench.ask(PROMPTS[2], depth=1, params=SAMPLED, num_draws=n) for n in range(1000)]
    proposal = bench.drafter.propose(requests)
    counts = torch.bincount(torch.tensor([t[0] for t in proposal.draft_token_ids]), minlength=VOCAB)
    law = proposal.draft_probs[0][0].double()
    error = (1000 * law * (1 - law)).sqrt() + 1e-9
    assert bool(((counts - 1000 * law).abs() <= 5 * error).all())
    assert len(set(counts.tolist())) > 3


def test_confidence_does_not_depend_on_the_token_drawn(bench: Bench) -> None:
    asked = [bench.ask(PROMPTS[2], depth=1, params=SAMPLED, num_draws=n) for n in range(30)]
    proposals = [bench.drafter.propose([request]) for request in asked]
    assert len({proposal.draft_token_ids[0][0] for proposal in proposals}) > 1
    assert len({proposal.confidence[0][0] for proposal in proposals}) == 1


@pytest.mark.parametrize("params", [SamplingParams(seed=2), SAMPLED])
def test_sampled_requests_draft_the_argmax_if_told_so(params: SamplingParams) -> None:
    drafter = make_drafter(NETWORKS["dspark"], is_greedy=True)
    assert not drafter.capabilities.emits_probs
    bench = Bench(TARGET, drafter)
    bench.compute((0, PROMPTS[2][:-1], 0))
    proposal = bench.drafter.propose([bench.ask(PROMPTS[2], params=params)])
    assert proposal.draft_probs == [None]
    greedy = bench.drafter.propose([bench.ask(PROMPTS[2])])
    assert proposal.draft_token_ids == greedy.draft_token_ids


def test_capabilities_say_what_the_engine_must_provide() -> None:
    config = NETWORKS["dspark"].config
    capabilities = make_drafter(NETWORKS["dspark"], depth=3).capabilities
    assert capabilities.target_layer_ids == config.target_layer_ids
    assert capabilities.max_speculative_tokens == capabilities.num_lookahead_slots == 3
    assert [(layer.num_kv_heads, layer.head_dim) for layer in capabilities.kv_layers] == [
        (2, 16)
    ] * 2
    assert capabilities.emits_confidence
    assert capabilities.emits_probs
    assert not make_drafter(NETWORKS["dflash"]).capabilities.emits_confidence

"""The draft model: what it accepts when it is the target, its own K/V, its choices, its refusals.

Engines are the real ones over tiny random models; `Harness` runs the drafter alone over a pool.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

import tiny_models
from fakes import collect_tokens, continue_greedily, drain, new_request
from forerun.attention import build_attention_backend
from forerun.cache.kv_store import KVStore
from forerun.config import EngineConfig
from forerun.core import RequestOutput, SamplingParams
from forerun.drafters import draft_model, draft_sampling, load_draft_model, read_kv_layers
from forerun.drafters.base import DrafterCache, DraftProposal
from forerun.drafters.draft_model import DraftModelDrafter
from forerun.drafters.draft_sampling import DraftRules
from forerun.drafters.vocabulary import check_same_vocabulary, check_vocab_size
from forerun.engine import build
from forerun.engine import engine as engine_module
from forerun.engine.engine import Engine
from forerun.errors import ConfigError
from forerun.kernels import find_kernels
from forerun.models.decoder import DecoderModel
from forerun.plan import DraftRequest
from forerun.speculative_config import SpeculativeConfig
from gguf_files import write_random
from model_engines import (
    KV_BLOCK_SIZE,
    NoEosTokenizer,
    compute_last_logits,
    make_model,
    make_model_engine,
)

K = 4
TARGET = make_model(seed=1)
# Another model of the same vocabulary, smaller in every other way.
OTHER = tiny_models.make_model(
    seed=2,
    vocab_size=257,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    eos_token_id=None,
)
GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(seed=11, temperature=0.9)
SAMPLED = SamplingParams(temperature=0.8)


def make_drafter(model: DecoderModel = TARGET, **rules: object) -> DraftModelDrafter:
    return DraftModelDrafter(model, max_speculative_tokens=K, rules=DraftRules(**rules))


def make_engine(model: DecoderModel = TARGET, **options: object) -> Engine:
    options.setdefault("speculative_config", {"num_speculative_tokens": K})
    return make_model_engine(TARGET, drafter=make_drafter(model), **options)


class CountingModel:
    """A model that notes how many rows each of its forwards had."""

    def __init__(self, model: DecoderModel) -> None:
        self._model = model
        self.spec = model.spec
        self.rows: list[int] = []

    def forward(self, token_ids: torch.Tensor, *args: object) -> object:
        self.rows.append(len(token_ids))
        return self._model.forward(token_ids, *args)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._model.compute_logits(hidden_states)


@dataclass
class Harness:
    """A drafter over a pool of its own: two layers of a target, then the draft model's."""

    drafter: DraftModelDrafter = field(default_factory=make_drafter)
    backend: str = "torch_ref"

    def __post_init__(self) -> None:
        layers = [*TARGET.spec.build_kv_layers(), *self.drafter.capabilities.kv_layers]
        self.store = KVStore(
            layers,
            num_blocks=400,
            kv_block_size=KV_BLOCK_SIZE,
            dtype=torch.float32,
            device="cpu",
        )
        cache = DrafterCache(
            kv_store=self.store,
            backend=build_attention_backend(self.backend),
            device=torch.device("cpu"),
        )
        self.drafter.bind(TARGET, cache)

    def ask(
        self,
        tokens: Sequence[int],
        *,
        place: int = 0,
        computed: int = 0,
        depth: int = K,
        params: SamplingParams = GREEDY,
        **fields: int,
    ) -> DraftRequest:
        """Return a request in the block range number `place`."""
        num_blocks = -(-(len(tokens) + K) // KV_BLOCK_SIZE)
        first = 1 + 60 * place
        return DraftRequest(
            request_id=f"r{place}",
            generation=0,
            token_ids=list(tokens),
            depth=depth,
            block_table=list(range(first, first + num_blocks)),
            params=params,
            seed=fields.get("seed", 5),
            choice_index=0,
            num_draws=fields.get("num_draws", 0),
            num_drafter_computed_tokens=computed,
        )

    def propose(self, *requests: DraftRequest) -> DraftProposal:
        return self.drafter.propose(requests)

    def read_kv(self, request: DraftRequest, num_tokens: int) -> torch.Tensor:
        """Return the drafter's K and V of the leading positions, all its layers."""
        pools = [*self.store.keys[2:], *self.store.values[2:]]
        slots = [
            (request.block_table[p // KV_BLOCK_SIZE], p % KV_BLOCK_SIZE) for p in range(num_tokens)
        ]
        return torch.stack([pool[block, :, at] for pool in pools for block, at in slots])


def run(engine: Engine, prompts: Sequence[Sequence[int]], **params: object) -> list[RequestOutput]:
    params.setdefault("max_tokens", 24)
    for index, prompt in enumerate(prompts):
        engine.add(new_request(f"r{index}", prompt, **params))
    return drain(engine)


def sum_stats(outputs: Sequence[RequestOutput]) -> tuple[int, int]:
    """Return verified and accepted tokens of all requests."""
    stats = [output.spec_stats for output in outputs if output.spec_stats is not None]
    return (
        sum(s.num_verified_tokens for s in stats),
        sum(s.num_accepted_tokens for s in stats),
    )


PROMPTS = [[1, 2, 3, 1, 2], [7] * 9, list(range(30, 60)), [5]]
BACKENDS = ["torch_ref", *(["native"] if find_kernels() is not None else [])]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"seed": 3},
        {"seed": 4, "top_p": 0.8, "temperature": 0.7},
        {"temperature": 0.9},
    ],
)
def test_the_target_as_its_own_drafter_is_always_right(
    params: dict, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Standard rows accept with p/q of two computations of the same p: seeds are fixed."""
    seeds = itertools.count()
    monkeypatch.setattr(engine_module.secrets, "randbits", lambda _: next(seeds))
    engine = make_engine(backend=backend)
    verified, accepted = sum_stats(run(engine, PROMPTS, **params))
    assert verified == accepted > 4 * 12


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"seed": 3}, {"seed": 4, "top_p": 0.8}])
@pytest.mark.parametrize("load", ["together", "alone", "preempted", "choices"])
def test_text_with_a_bad_draft_model_is_the_text_without(params: dict, load: str) -> None:
    options: dict[str, object] = {"max_num_seqs": 1} if load == "alone" else {}
    options |= {"num_blocks": 19} if load == "preempted" else {}
    given = {**params, "n": 3 if load == "choices" else 1}
    engine = make_engine(OTHER, **options)
    outputs = run(engine, PROMPTS, **given)
    plain = make_model_engine(TARGET, speculative_config={"method": "none"})
    assert collect_tokens(outputs) == collect_tokens(run(plain, PROMPTS, **given))
    verified, accepted = sum_stats(outputs)
    assert verified > accepted
    assert (engine.scheduler.num_preemptions > 0) == (load == "preempted")


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_int8_pool_holds_both_models(backend: str) -> None:
    options: dict[str, object] = {"kv_dtype": torch.int8, "backend": backend}
    outputs = run(make_engine(OTHER, **options), PROMPTS, temperature=0.0)
    plain = make_model_engine(TARGET, speculative_config={"method": "none"}, **options)
    assert collect_tokens(outputs) == collect_tokens(run(plain, PROMPTS, temperature=0.0))
    assert sum_stats(outputs)[0] > 0


def test_greedy_text_is_the_targets() -> None:
    tokens = collect_tokens(run(make_engine(OTHER), PROMPTS, temperature=0.0))
    for index, prompt in enumerate(PROMPTS):
        expected = continue_greedily(
            lambda prefix: int(compute_last_logits(TARGET, prefix).argmax()), prompt, 24
        )
        assert tokens[f"r{index}", 0] == expected


def test_acceptance_survives_preemption() -> None:
    engine = make_engine(num_blocks=19)
    verified, accepted = sum_stats(run(engine, PROMPTS, temperature=0.0))
    assert engine.scheduler.num_preemptions > 0
    assert verified == accepted > 0


def run_twice(*, enable_prefix_caching: bool) -> tuple[list[RequestOutput], list[int]]:
    """Return the outputs of a request after an equal one, and the rows the drafter computed."""
    counting = CountingModel(make_model(seed=1))
    drafter = DraftModelDrafter(counting, max_speculative_tokens=K)
    engine = make_model_engine(
        TARGET,
        drafter=drafter,
        speculative_config={"num_speculative_tokens": K},
        enable_prefix_caching=enable_prefix_caching,
    )
    prompt = list(range(40, 80))
    run(engine, [prompt], temperature=0.0)
    counting.rows.clear()
    return run(engine, [prompt], temperature=0.0), counting.rows


def test_a_prefix_hit_brings_valid_drafter_context_along() -> None:
    hit, hit_rows = run_twice(enable_prefix_caching=True)
    miss, miss_rows = run_twice(enable_prefix_caching=False)
    assert hit[-1].num_cached_tokens == 36
    assert collect_tokens(hit) == collect_tokens(miss)
    assert sum_stats(hit) == sum_stats(miss)
    assert miss_rows[0] == 41
    assert hit_rows[0] == 41 - 36


def test_steps_without_drafting_are_caught_up() -> None:
    """K/V computed in two goes, with a rejected draft in between, equal K/V computed at once."""
    harness = Harness()
    tokens = list(range(10, 40))
    first = harness.ask(tokens[:13])
    proposal = harness.propose(first)
    assert proposal.num_computed_tokens == [13 + K - 1]
    assert proposal.draft_token_ids[0] != tokens[13 : 13 + K], "all of them are rejected"
    later = harness.ask(tokens, computed=13)
    once = harness.ask(tokens, place=1)
    drafts = [harness.propose(request).draft_token_ids for request in (later, once)]
    assert drafts[0] == drafts[1]
    torch.testing.assert_close(
        harness.read_kv(later, 30 + K - 1), harness.read_kv(once, 30 + K - 1)
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_long_gaps_are_computed_in_bounded_pieces(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [list(range(50)), [9] * 20, [3, 4]]
    whole = Harness(backend=backend)
    requests = [whole.ask(tokens, place=place) for place, tokens in enumerate(prompts)]
    expected = whole.propose(*requests)
    monkeypatch.setattr(draft_model, "MAX_CATCH_UP_ROWS", 7)
    counting = CountingModel(make_model(seed=1))
    pieces = Harness(DraftModelDrafter(counting, max_speculative_tokens=K), backend)
    assert pieces.propose(*requests).draft_token_ids == expected.draft_token_ids
    # 49 + 19 + 1 rows before the anchors, then 3 rows for each of K tokens.
    assert counting.rows == [*[7] * 9, 6, *[3] * K]
    for request in requests:
        length = len(request.token_ids) + K - 1
        torch.testing.assert_close(pieces.read_kv(request, length), whole.read_kv(request, length))


def test_the_targets_layers_are_left_alone() -> None:
    harness = Harness()
    harness.propose(harness.ask(range(20)))
    assert not any(pool.any() for pool in (*harness.store.keys[:2], *harness.store.values[:2]))
    assert all(pool.any() for pool in (*harness.store.keys[2:], *harness.store.values[2:]))


def test_requests_of_every_kind_and_depth_draft_as_they_do_alone() -> None:
    kinds = [GREEDY, SEEDED, SAMPLED]
    asked = [
        {"tokens": range(place, place + 9), "place": place, "params": kinds[place % 3]}
        | {"depth": 1 + place % K, "seed": place}
        for place in range(6)
    ]
    harness = Harness()
    together = harness.propose(*(harness.ask(**fields) for fields in asked))
    for place, fields in enumerate(asked):
        alone = Harness()
        proposal = alone.propose(alone.ask(**fields))
        assert together.draft_token_ids[place] == proposal.draft_token_ids[0]
        assert len(proposal.draft_token_ids[0]) == fields["depth"]
        assert together.evidence[place] == pytest.approx(proposal.evidence[0], abs=1e-4)
        assert together.num_computed_tokens[place] == proposal.num_computed_tokens[0]


def compute_law(tokens: Sequence[int], temperature: float) -> torch.Tensor:
    return (compute_last_logits(TARGET, list(tokens)) / temperature).softmax(dim=-1)


def test_sampled_requests_hand_over_the_law_they_drew_from() -> None:
    harness = Harness()
    tokens = [4, 5, 6]
    proposal = harness.propose(harness.ask(tokens, params=SAMPLED))
    (drafts,), (probs,) = proposal.draft_token_ids, proposal.draft_probs
    assert probs.dtype == torch.float32
    for place, token in enumerate(drafts):
        torch.testing.assert_close(probs[place], compute_law([*tokens, *drafts[:place]], 0.8))
        assert probs[place, token] > 0


def test_drawn_tokens_follow_q() -> None:
    """The mean of 1,000 first draws' log-probabilities is that of q, within 4 standard errors."""
    harness = Harness()
    law = compute_law([4, 5, 6], 0.8).double()
    logs = law.log()
    mean = float((law * logs).sum())
    spread = float((law * (logs - mean) ** 2).sum()) ** 0.5
    drawn = [
        harness.propose(harness.ask([4, 5, 6], depth=1, params=SAMPLED, num_draws=n))
        for n in range(1000)
    ]
    tokens = [proposal.draft_token_ids[0][0] for proposal in drawn]
    assert abs(float(logs[tokens].mean()) - mean) < 4 * spread / 1000**0.5
    assert len(set(tokens)) > 20


@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_greedy_and_coupled_drafts_are_deterministic(params: SamplingParams) -> None:
    harness = Harness()
    first, second = (
        harness.propose(harness.ask([4, 5, 6], params=params, num_draws=n)) for n in range(2)
    )
    assert first.draft_probs == [None]
    assert first.draft_token_ids == second.draft_token_ids


@pytest.mark.parametrize("params", [SEEDED, SAMPLED])
def test_sampled_requests_draft_the_argmax_if_told_so(params: SamplingParams) -> None:
    harness = Harness(make_drafter(is_greedy=True))
    proposal = harness.propose(harness.ask([4, 5, 6], params=params))
    assert proposal.draft_probs == [None]
    greedy = harness.propose(harness.ask([4, 5, 6], place=1))
    assert proposal.draft_token_ids == greedy.draft_token_ids
    assert not harness.drafter.capabilities.emits_probs


def test_the_default_verifier_decides_how_unseeded_requests_draft() -> None:
    harness = Harness(make_drafter(default_method="coupled"))
    assert harness.propose(harness.ask([4, 5], params=SAMPLED)).draft_probs == [None]


@pytest.mark.parametrize("params", [GREEDY, SEEDED, SAMPLED])
def test_evidence_is_the_log_odds_of_the_best_token(params: SamplingParams) -> None:
    harness = Harness()
    tokens = [4, 5, 6]
    proposal = harness.propose(harness.ask(tokens, params=params))
    (drafts,), (evidence,) = proposal.draft_token_ids, proposal.evidence
    for place, value in enumerate(evidence):
        law = compute_law([*tokens, *drafts[:place]], params.temperature or 1.0)
        best = float(law.max())
        assert value == pytest.approx(np.log(best / (1 - best)), abs=1e-3)


def test_evidence_does_not_depend_on_the_token_drawn() -> None:
    harness = Harness()
    asked = [harness.ask([4, 5], depth=1, params=SAMPLED, num_draws=n) for n in range(20)]
    proposals = [harness.propose(request) for request in asked]
    assert len({proposal.draft_token_ids[0][0] for proposal in proposals}) > 1
    assert len({proposal.evidence[0][0] for proposal in proposals}) == 1


def test_evidence_is_bounded_and_nan_stays_nan() -> None:
    harness = Harness()
    request = harness.ask([4, 5])
    sampler = draft_sampling.DraftSampler([request] * 2, DraftRules(), 10)
    logits = torch.zeros(2, 10)
    logits[0, 3], logits[1, 3] = 1e4, torch.nan
    token_ids, evidence = sampler.choose(logits, np.arange(2), 0)
    assert token_ids[0] == 3
    assert evidence[0] == draft_sampling.MAX_EVIDENCE
    assert evidence[1].isnan()


def test_memory_for_q_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests past the limit draft the argmax, which needs no q."""
    monkeypatch.setattr(draft_sampling, "MAX_PROBS_BYTES", 2 * 4 * K * TARGET.spec.vocab_size)
    harness = Harness()
    asked = [harness.ask([4, 5], place=place, params=SAMPLED) for place in range(3)]
    proposal = harness.propose(*asked)
    assert [probs is None for probs in proposal.draft_probs] == [False, False, True]
    greedy = harness.propose(harness.ask([4, 5], place=3))
    assert proposal.draft_token_ids[2] == greedy.draft_token_ids[0]


def test_logits_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [[place, 5, 6] for place in range(5)]
    whole = Harness()
    expected = whole.propose(*(whole.ask(t, place=i) for i, t in enumerate(asked)))
    monkeypatch.setattr(draft_model, "MAX_LOGITS_BYTES", 2 * 4 * TARGET.spec.vocab_size)
    counting = CountingModel(make_model(seed=1))
    split = Harness(DraftModelDrafter(counting, max_speculative_tokens=K))
    proposal = split.propose(*(split.ask(t, place=i) for i, t in enumerate(asked)))
    assert proposal.draft_token_ids == expected.draft_token_ids
    assert counting.rows == [6, 2, 2, 2, 6, 2, 2, 2, 3, 1, 1, 1]


def test_nothing_is_drafted_beyond_the_draft_models_context() -> None:
    counting = CountingModel(make_model(seed=1))
    counting.spec = dataclasses.replace(TARGET.spec, max_model_len=12)
    harness = Harness(DraftModelDrafter(counting, max_speculative_tokens=K))
    asked = [harness.ask(range(length), place=p) for p, length in enumerate((8, 10, 12, 13))]
    proposal = harness.propose(*asked)
    assert [len(tokens) for tokens in proposal.draft_token_ids] == [K, 3, 1, 0]
    assert proposal.num_computed_tokens == [11, 12, 12, 0]


@dataclass(frozen=True)
class Spelling:
    """Stands for a tokenizer: spellings, and ids of any text."""

    spellings: tuple[str, ...] = ("a", "b", "c")
    ids: tuple[int, ...] = (1, 2)

    @property
    def vocab_size(self) -> int:
        return len(self.spellings)

    def id_to_token(self, token_id: int) -> str:
        return self.spellings[token_id]

    def encode(self, text: str, **_: object) -> list[int]:
        return list(self.ids)


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (Spelling(("a", "b")), "2 tokens, the target's 3"),
        (Spelling(("a", "x", "c")), "token 1 is 'x' for the draft model and 'b'"),
        (Spelling(ids=(2, 1)), r"differently \(\[2, 1\] and \[1, 2\]\)"),
    ],
)
def test_another_vocabulary_is_refused_with_what_differs(drafter: Spelling, message: str) -> None:
    check_same_vocabulary(Spelling(), Spelling())
    with pytest.raises(ConfigError, match=message):
        check_same_vocabulary(Spelling(), drafter)


def test_another_size_of_logits_is_refused() -> None:
    check_vocab_size(5, 5)
    with pytest.raises(ConfigError, match="of 6 tokens, the target of 5"):
        check_vocab_size(5, 6)


def test_a_missing_draft_model_is_refused_by_its_key(tmp_path: Path) -> None:
    config = SpeculativeConfig(method="draft_model", model=str(tmp_path / "none.gguf"))
    with pytest.raises(ConfigError, match=r"speculative_config 'model'.*none.gguf"):
        read_kv_layers(config)


@pytest.fixture
def byte_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of random models have no tokenizer: take the byte tokenizer for all."""
    for module in (build, load_draft_model):
        monkeypatch.setattr(module, "load_tokenizer", lambda _: NoEosTokenizer())


def build_from_files(target: Path, drafter: Path, **speculative: object) -> Engine:
    config = {"method": "draft_model", "model": str(drafter), **speculative}
    options = {"dtype": "float32", "kv_cache_memory": "4M", "speculative_config": config}
    return build.build_engine(EngineConfig.from_options(model=str(target), **options))[0]


@pytest.mark.usefixtures("byte_tokenizer")
@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q4_1])
def test_an_engine_loads_a_draft_model_from_its_file(tmp_path: Path, kind: Kind) -> None:
    target = write_random(tmp_path / "m.gguf", "llama", kind=kind)
    engine = build_from_files(target, target)
    outputs = run(engine, [[3, 4, 5]], temperature=0.0, ignore_eos=True)
    verified, accepted = sum_stats(outputs)
    assert verified == accepted > 0


@pytest.mark.usefixtures("byte_tokenizer")
def test_an_engine_refuses_a_draft_model_of_another_vocabulary(tmp_path: Path) -> None:
    target = write_random(tmp_path / "m.gguf", "llama")
    other = write_random(tmp_path / "d.gguf", "llama", vocab_size=90)
    with pytest.raises(ConfigError, match="of 90 tokens, the target of"):
        build_from_files(target, other)

"""The peer benchmark without its peers: order, rates, ratios, and how failures are told."""

from __future__ import annotations

import io
import json
import math
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

# The benchmark is run from the checkout, where it is a package of its own.
sys.path.append(str(Path(__file__).parents[3]))

from benchmarks.peers import install as peers_install
from benchmarks.peers.__main__ import parse_plan
from benchmarks.peers.adapters.base import Measurement, Work
from benchmarks.peers.adapters.group import Group, PeerError, read_last_line
from benchmarks.peers.adapters.llama_cpp import count_context, link_sonames
from benchmarks.peers.install import Recipe, install
from benchmarks.peers.quantised import build_quantised_table, summarise_quantised_row
from benchmarks.peers.rates import (
    RateError,
    compute_decode_rate,
    compute_prefill_rate,
    merge_streams,
    read_batched_bench,
)
from benchmarks.peers.report import build_model_report, build_notes, build_table, summarise_row
from benchmarks.peers.rows import Row, build_rows, cut_prompts, find_bound, find_quantised_bound
from benchmarks.peers.runner import BlockRunner, Cell, Phase, rotate
from benchmarks.peers.weights import (
    ModelFiles,
    count_file_step_bytes,
    count_step_bytes,
    write_bf16_gguf,
)
from benchmarks.peers.workers.lines import StepClock, serve_lines
from rich.console import Console

from forerun.bench.options import BenchConfig
from forerun.errors import ConfigError
from forerun.models import find_model_class
from tiny_models import make_spec

SMOLLM2 = "smollm2-135m-instruct"
DECODE = Row(kind="decode", num_streams=1)


class FakeAdapter:
    """Answers with given rates in turn; an exception among them is raised."""

    def __init__(self, name: str, rates: Sequence[float | BaseException], calls: list[str]) -> None:
        self.facts: dict[str, Any] = {"version": "1"}
        self.is_stopped = False
        self._name = name
        self._rates = list(rates)
        self._calls = calls

    def measure(self, work: Work) -> Measurement:
        self._calls.append(f"{work.row.name}/{self._name}")
        rate = self._rates.pop(0)
        if isinstance(rate, BaseException):
            raise rate
        return Measurement(rate)

    def stop(self) -> None:
        self.is_stopped = True


def make_work(row: Row, block: int) -> Work:
    return Work(row=row, prompts=[[block]], bench=BenchConfig())


def make_runner(num_blocks: int) -> BlockRunner:
    return BlockRunner(
        num_blocks=num_blocks,
        build_work=make_work,
        read_bandwidth=lambda: 20e9,
        note=lambda _text: None,
        advance=lambda: None,
    )


def make_phase(rows: Sequence[Row], adapters: dict[str, FakeAdapter | PeerError]) -> Phase:
    def start(peer: str) -> FakeAdapter:
        adapter = adapters[peer]
        if isinstance(adapter, PeerError):
            raise adapter
        return adapter

    factories = {peer: lambda peer=peer: start(peer) for peer in adapters}
    return Phase(
        name="engine", rows=rows, peers_of=lambda _row: list(adapters), factories=factories
    )


def make_files(*, step_bytes: int = 200_000_000, file_step_bytes: int = 50_000_000) -> ModelFiles:
    nowhere = Path("nowhere")
    return ModelFiles(
        name=SMOLLM2,
        native=nowhere,
        folder=nowhere,
        bf16_gguf=nowhere,
        step_bytes=step_bytes,
        file_step_bytes=file_step_bytes,
        max_model_len=8192,
    )


def make_cells(values: dict[str, list[float | None]], row: str = "decode 1") -> list[Cell]:
    return [
        Cell(row=row, peer=peer, block=block, order=0, value=value, error=None)
        if value is not None
        else Cell(row=row, peer=peer, block=block, order=0, error="it broke")
        for peer, series in values.items()
        for block, value in enumerate(series)
    ]


def test_every_peer_has_every_place_equally_often() -> None:
    orders = [rotate(["a", "b", "c"], turn) for turn in range(6)]
    for place in range(3):
        assert sorted(order[place] for order in orders) == ["a", "a", "b", "b", "c", "c"]


def test_decode_rate_counts_the_time_in_which_all_streams_decode() -> None:
    steps = [(1.0, 1, 1, 0), (2.0, 3, 2, 0), (3.0, 5, 2, 0), (4.0, 7, 2, 1), (9.0, 8, 2, 2)]
    # From 2 s, when the second stream has its first token, to 4 s, when the first one ends.
    assert compute_decode_rate(steps, 2) == pytest.approx((7 - 3) / (4.0 - 2.0))


@pytest.mark.parametrize(
    "steps",
    [
        [(1.0, 1, 1, 0), (2.0, 2, 1, 1)],
        [(1.0, 2, 2, 0), (2.0, 4, 2, 0)],
        [(1.0, 1, 1, 0), (2.0, 3, 2, 1)],
    ],
    ids=["a stream never begins", "no stream ends", "the first ends as the last begins"],
)
def test_decode_rate_is_refused_where_streams_never_decode_together(
    steps: list[tuple[float, int, int, int]],
) -> None:
    with pytest.raises(RateError, match="all 2 streams"):
        compute_decode_rate(steps, 2)


def test_prefill_rate_ends_with_the_last_first_token() -> None:
    steps = [(0.5, 1, 1, 1), (4.0, 2, 2, 2)]
    assert compute_prefill_rate(steps, 2, 100) == pytest.approx(2 * 100 / 4.0)
    with pytest.raises(RateError, match="not all of 3"):
        compute_prefill_rate(steps, 3, 100)


def test_steps_of_streams_that_report_events_give_the_same_rate() -> None:
    steps = merge_streams([[11.0, 12.0, 13.0], [12.0, 13.0, 14.0]], start_s=10.0)
    assert compute_prefill_rate(steps, 2, 50) == pytest.approx(2 * 50 / 2.0)
    # 12 s to 13 s: one token of each stream.
    assert compute_decode_rate(steps, 2) == pytest.approx(2.0)


def test_rates_of_batched_bench_are_read_from_its_json_line() -> None:
    output = 'noise\n{"pp": 128, "speed_pp": 1000.5, "speed_tg": 91.25}\n'
    assert read_batched_bench(output) == (1000.5, 91.25)
    with pytest.raises(RateError, match="no result"):
        read_batched_bench("noise only\n")


def test_a_step_clock_counts_streams_that_began_and_ended() -> None:
    clock = StepClock(num_streams=2, max_tokens=2)
    clock.add(0, 1)
    clock.tick()
    clock.add(0, 1)
    clock.add(1, 1)
    clock.tick()
    assert [step[1:] for step in clock.steps] == [(1, 1, 0), (3, 2, 1)]
    assert 0 <= clock.steps[0][0] <= clock.steps[1][0]


def test_a_worker_tells_an_error_and_answers_the_next_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answer(request: dict[str, Any]) -> dict[str, Any]:
        return {"half": request["number"] // request["parts"]}

    requests = [{"number": 4, "parts": 0}, {"number": 4, "parts": 2}]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(map(json.dumps, requests)) + "\n"))
    answers = io.StringIO()
    serve_lines({"version": "1"}, answer, answers)
    ready, failed, answered = map(json.loads, answers.getvalue().splitlines())
    assert ready == {"version": "1"}
    assert failed["error"].startswith("ZeroDivisionError")
    assert answered == {"half": 2}


def test_prompts_differ_between_streams_and_blocks_and_wrap_around() -> None:
    row = Row(kind="decode", num_streams=3, prompt_tokens=40)
    text = list(range(100))
    first, second = cut_prompts(text, row, block=0), cut_prompts(text, row, block=1)
    assert [len(prompt) for prompt in first] == [40, 40, 40]
    assert first[0] == text[:40]
    assert first[2] == text[80:] + text[:20]
    assert len({tuple(prompt) for prompt in first + second}) == 6


def test_rows_come_in_table_order_and_know_their_bounds() -> None:
    rows = build_rows(["serve", "decode", "prefill"], [1, 64])
    names = ["decode 1", "decode 64", "prefill 64 x 128", "prefill 1 x 4096", "serve 1", "serve 64"]
    assert [row.name for row in rows] == names
    bounds = [find_bound(SMOLLM2, row) for row in rows]
    assert bounds == [0.95, 1.2, 1.0, 1.0, None, 1.2]


def test_quantised_rows_bring_along_the_bf16_row_they_are_compared_with() -> None:
    names = ["decode 1", "quantised 1", "decode 64", "quantised 64"]
    assert [row.name for row in build_rows(["quantised"], [1, 64])] == names
    assert [row.name for row in build_rows(["decode", "quantised"], [1, 64])] == names


def test_what_a_quantised_row_must_reach_depends_on_model_and_streams() -> None:
    rows = [Row(kind="quantised", num_streams=count) for count in (1, 64, 2)]
    bounds = [find_quantised_bound(SMOLLM2, row) for row in rows]
    assert bounds == [("same_file", 2.2), ("any_precision", 1.5), None]
    assert find_quantised_bound("qwen2.5-coder-0.5b-instruct", rows[0]) == ("same_file", 1.3)
    assert find_quantised_bound("gemma3-270m", rows[0]) is None


def test_unknown_rows_and_streams_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'decode'"):
        build_rows(["decod"], [1])
    with pytest.raises(ConfigError, match="at least 1"):
        build_rows(["decode"], [0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "vlm"], "did you mean 'vllm'"),
        (["--streams", "1,many"], "numbers with commas"),
        (["--blocks", "0"], "at least 1"),
    ],
)
def test_a_wrong_command_line_says_what_is_allowed(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_plan(arguments)


def test_a_row_without_any_of_the_chosen_peers_is_left_out() -> None:
    plan = parse_plan(["--only", "transformers,vllm", "--rows", "quantised", "--streams", "1,4"])
    assert [row.name for row in plan.rows] == ["decode 1", "decode 4"]
    plan = parse_plan(["--rows", "quantised", "--streams", "4"])
    everybody = ["forerun", "llama.cpp", "vllm", "transformers"]
    assert [plan.peers_of(row) for row in plan.rows] == [everybody, ["forerun", "llama.cpp"]]
    assert plan.num_cells == 3 * (4 + 2)


def test_blocks_are_interleaved_in_rotated_order() -> None:
    calls: list[str] = []
    rows = [DECODE, Row(kind="decode", num_streams=4)]
    adapters = {name: FakeAdapter(name, [1.0] * 4, calls) for name in ("forerun", "vllm")}
    make_runner(num_blocks=2).run(make_phase(rows, dict(adapters)))
    assert calls == [
        *("decode 1/forerun", "decode 1/vllm", "decode 4/vllm", "decode 4/forerun"),
        *("decode 1/vllm", "decode 1/forerun", "decode 4/vllm", "decode 4/forerun"),
    ]
    assert all(adapter.is_stopped for adapter in adapters.values())


def test_the_best_peer_is_chosen_in_every_block() -> None:
    cells = make_cells({"forerun": [12, 10, 30], "vllm": [10, 5, 20], "llama.cpp": [8, 20, 10]})
    row = summarise_row(SMOLLM2, DECODE, cells)
    assert row["best_peers"] == ["vllm", "llama.cpp", "vllm"]
    assert row["ratios"] == pytest.approx([1.2, 0.5, 1.5])
    assert (row["ratio_median"], row["is_met"]) == (pytest.approx(1.2), True)
    assert row["peers"]["vllm"]["median"] == 10


def test_a_quantised_row_meets_every_precision_of_its_block() -> None:
    row = Row(kind="quantised", num_streams=4)
    cells = make_cells({"forerun": [300, 300], "llama.cpp": [150, 120]}, "quantised 4")
    cells += make_cells(
        {"forerun": [900, 900], "vllm": [100, 250], "llama.cpp": [90, 90]}, "decode 4"
    )
    cells += make_cells({"vllm": [9000, 9000]}, "decode 16")
    summary = summarise_quantised_row(SMOLLM2, row, cells)
    assert summary["same_file"]["ratios"] == pytest.approx([2.0, 2.5])
    assert summary["any_precision"]["ratios"] == pytest.approx([2.0, 1.2])
    assert summary["any_precision"]["best_peers"] == ["llama.cpp file", "vllm bf16"]
    assert (summary["against"], summary["bound"], summary["is_met"]) == ("any_precision", 1.5, True)
    assert list(summary["bf16_peers"]) == ["vllm", "llama.cpp"]


def test_a_quantised_row_is_not_judged_by_the_other_ratio() -> None:
    row = Row(kind="quantised", num_streams=1)
    cells = make_cells({"forerun": [300], "llama.cpp": [120]}, "quantised 1")
    cells += make_cells({"vllm": [250]})
    summary = summarise_quantised_row(SMOLLM2, row, cells)
    assert summary["any_precision"]["ratio_median"] == pytest.approx(1.2)
    assert (summary["bound"], summary["is_met"]) == (2.2, True)
    only_bf16 = make_cells({"forerun": [300], "llama.cpp": [None]}, "quantised 1")
    summary = summarise_quantised_row(SMOLLM2, row, only_bf16 + make_cells({"vllm": [250]}))
    assert summary["same_file"]["ratios"] == []
    assert summary["is_met"] is None


def test_forerun_has_a_program_for_each_mode_and_the_table_shows_both() -> None:
    exact = FakeAdapter("exact", [100.0], [])
    adapters: dict[str, FakeAdapter | PeerError] = {
        "forerun": exact,
        "forerun int8": FakeAdapter("int8", [300.0], []),
        "llama.cpp": FakeAdapter("llama.cpp", [90.0, 110.0], []),
    }

    def start(name: str) -> FakeAdapter | PeerError:
        return adapters[name]

    rows = build_rows(["quantised"], [1])
    phase = Phase(
        name="engine",
        rows=rows,
        peers_of=lambda _row: ["forerun", "llama.cpp"],
        factories={name: lambda name=name: start(name) for name in adapters},
    )
    runner = make_runner(num_blocks=1)
    runner.run(phase)
    assert list(runner.measured.facts) == list(adapters)
    report = build_model_report(make_files(), rows, runner.measured)
    assert [row["row"] for row in report["rows"]] == ["decode 1"]
    assert report["quantised"]["rows"][0]["same_file"]["ratios"] == [pytest.approx(300 / 110)]
    # 50 MB at 20 GB/s: 400 steps a second.
    assert report["quantised"]["floor"]["shares"]["forerun"] == [pytest.approx(300 / 400)]
    assert report["floor"]["shares"]["forerun"] == [pytest.approx(100 / 100)]
    console = Console(width=250, record=True, file=io.StringIO())
    console.print(build_quantised_table(report, ["forerun", "llama.cpp"]))
    lines = console.export_text().splitlines()
    (line,) = [text for text in lines if "quantised 1 " in text]
    assert "2.20 ok (same file)" in line
    assert "llama.cpp file" in line
    (line,) = [text for text in lines if "quantised 1, of the floor" in text]
    assert "75 %" in line
    assert "60 %" in line
    json.dumps(report)


def test_blocks_without_both_sides_give_no_ratio() -> None:
    row = summarise_row(SMOLLM2, DECODE, make_cells({"forerun": [None, 9], "vllm": [10, None]}))
    assert row["ratios"] == []
    assert row["ratio_median"] is row["is_met"] is None
    assert row["peers"]["vllm"] == {
        "values": [10, None],
        "median": 10,
        "min": 10,
        "max": 10,
        "errors": ["it broke"],
    }


def test_a_peer_that_does_not_start_is_reported_and_the_others_are_measured() -> None:
    vllm = FakeAdapter("vllm", [40.0, PeerError("out of memory")], [])
    vllm.facts["remark"] = "an older build"
    adapters: dict[str, FakeAdapter | PeerError] = {
        "forerun": FakeAdapter("forerun", [50.0, 60.0], []),
        "llama.cpp": PeerError("no compiler"),
        "vllm": vllm,
    }
    runner = make_runner(num_blocks=2)
    runner.run(make_phase([DECODE], adapters))
    report = build_model_report(make_files(), [DECODE], runner.measured)
    assert report["quantised"] is None
    assert report["rows"][0]["ratios"] == [pytest.approx(50 / 40)]
    assert report["floor"]["shares"]["forerun"] == pytest.approx([0.5, 0.6])
    notes = build_notes(report)
    assert notes == [
        "vllm: an older build",
        "llama.cpp failed in decode 1: did not start: no compiler",
        "vllm failed in decode 1: out of memory",
    ]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(build_table(report, list(adapters)))
    (line,) = [text for text in console.export_text().splitlines() if "decode 1 " in text]
    assert "failed" in line
    assert "55.0 (50.0 .. 60.0)" in line
    json.dumps(report)


def test_what_was_measured_before_an_interrupt_is_kept_and_all_peers_are_stopped() -> None:
    adapters = {
        "forerun": FakeAdapter("forerun", [50.0], []),
        "vllm": FakeAdapter("vllm", [KeyboardInterrupt()], []),
    }
    runner = make_runner(num_blocks=1)
    with pytest.raises(KeyboardInterrupt):
        runner.run(make_phase([DECODE], dict(adapters)))
    assert [(cell.peer, cell.value) for cell in runner.measured.cells] == [("forerun", 50.0)]
    assert all(adapter.is_stopped for adapter in adapters.values())


def test_a_paused_program_is_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    group = Group(command, log_path=tmp_path / "log", environment={}, is_piped=True)
    group.pause()
    group.stop()
    assert group.process.returncode == -signal.SIGTERM


def test_a_program_that_cannot_start_or_ends_early_says_why(tmp_path: Path) -> None:
    log_path = tmp_path / "log"
    with pytest.raises(PeerError, match="cannot start .*nowhere"):
        Group([tmp_path / "nowhere"], log_path=log_path, environment={})
    command = [sys.executable, "-c", "raise RuntimeError('no room')"]
    group = Group(command, log_path=log_path, environment={})
    group.process.wait()
    message = str(group.explain("it did not start"))
    assert "ended with code 1; RuntimeError: no room" in message
    assert str(log_path) in message


def test_the_last_error_of_a_log_is_shown(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("ERROR: no matching distribution\n\nnotice: a new pip is out\n")
    assert read_last_line(log) == "ERROR: no matching distribution"
    log.write_text("")
    assert read_last_line(log) == "it wrote nothing"


def test_an_environment_is_made_once_per_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def run_steps(recipe: Recipe, folder: Path, _note: object) -> None:
        made.append(recipe.steps[0][1])
        folder.mkdir()

    monkeypatch.setattr(peers_install, "_run_steps", run_steps)
    for version in ("x==1", "x==1", "x==2"):
        recipe = Recipe(name="x", steps=(("install", version),))
        assert install(recipe, tmp_path, lambda _text: None) == tmp_path / "x"
    assert made == ["x==1", "x==2"]


@pytest.mark.parametrize(("is_compiled", "num_tries"), [(True, 1), (False, 2)])
def test_only_a_failed_compilation_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_compiled: bool, num_tries: int
) -> None:
    tries: list[str] = []

    def run_steps(recipe: Recipe, _folder: Path, _note: object) -> None:
        tries.append(recipe.name)
        raise PeerError("no compiler")

    monkeypatch.setattr(peers_install, "_run_steps", run_steps)
    recipe = Recipe(name="x", steps=(("install", "x==1"),), is_compiled=is_compiled)
    for _ in range(2):
        with pytest.raises(PeerError, match="no compiler"):
            install(recipe, tmp_path, lambda _text: None)
    assert len(tries) == num_tries


def test_libraries_get_the_names_programs_look_for(tmp_path: Path) -> None:
    for name in ("libllama.so.0.6.0", "libggml-base.so.0.26.0", "libllama-server-impl.so"):
        (tmp_path / name).write_text(name)
    link_sonames(tmp_path)
    link_sonames(tmp_path)
    links = {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_symlink()}
    assert links == {
        "libllama.so.0": "libllama.so.0.6.0",
        "libggml-base.so.0": "libggml-base.so.0.26.0",
    }


def test_llama_cpp_gets_room_for_the_longest_stream() -> None:
    row = Row(kind="serve", num_streams=4, max_tokens=128)
    work = Work(row=row, prompts=[[1] * 100, [1] * 200], bench=BenchConfig())
    assert count_context(work) == 4 * 512


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_step_reads_every_matrix_but_a_separate_embedding(is_tied: bool) -> None:
    spec = make_spec("llama", tie_word_embeddings=is_tied)
    slots = find_model_class(spec.architecture)(spec, torch.bfloat16, "cpu").slots()
    shapes = {name: slot.shape for name, slot in slots.items() if len(slot.shape) == 2}
    if not is_tied:
        del shapes["embed.weight"]
    assert count_step_bytes(spec) == 2 * sum(map(math.prod, shapes.values()))


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_step_reads_the_matrices_of_a_file_as_they_are_stored(
    tmp_path: Path, is_tied: bool
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "native.gguf", "llama")
    kinds = {"token_embd.weight": "Q8_0", "blk.0.ffn_up.weight": "Q4_1"}
    if not is_tied:
        kinds["output.weight"] = "Q8_0"
    for name, kind in kinds.items():
        quantised = gguf.GGMLQuantizationType[kind]
        matrix = gguf.quantize(np.ones((4, 64), np.float32), quantised)
        writer.add_tensor(name, matrix, raw_dtype=quantised)
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    # Two blocks of 32 a row: 34 bytes each in Q8_0, 20 in Q4_1. One table is read, tied or not.
    assert count_file_step_bytes(tmp_path / "native.gguf") == 4 * 2 * (34 + 20)


def test_the_bf16_file_holds_the_rounded_numbers_and_all_metadata(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    matrix = gguf.quantize(rng.standard_normal((4, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    vector = rng.standard_normal(64).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "native.gguf", "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_array("tokenizer.ggml.tokens", ["a", "\u00e9"])
    writer.add_tensor("m.weight", matrix, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("v.weight", vector)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write_bf16_gguf(tmp_path / "native.gguf", tmp_path / "bf16.gguf")
    reader = gguf.GGUFReader(tmp_path / "bf16.gguf")
    assert reader.fields["llama.block_count"].contents() == 2
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "\u00e9"]
    stored = {tensor.name: tensor for tensor in reader.tensors}
    assert stored["m.weight"].tensor_type == gguf.GGMLQuantizationType.BF16
    exact = gguf.dequantize(matrix, gguf.GGMLQuantizationType.Q8_0)
    bf16 = gguf.dequantize(stored["m.weight"].data, gguf.GGMLQuantizationType.BF16)
    np.testing.assert_allclose(bf16, exact, rtol=2**-8)
    assert not np.any(bf16.view(np.uint32) & 0xFFFF)
    np.testing.assert_array_equal(stored["v.weight"].data, vector)

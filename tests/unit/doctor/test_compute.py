"""What computes: the doctor says what an engine would choose."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forerun.config import EngineConfig
from forerun.doctor.compute import (
    Choice,
    ComputeState,
    check_compute,
    choose_attention,
    describe_linear,
)
from forerun.doctor.report import Section
from forerun.engine import resolve as resolving
from forerun.engine.resolve import resolve
from forerun.kernels import Kernels
from tiny_models import make_spec
from unit.doctor.sections import texts, the_problem, values


def check(**changes: Any) -> Section:
    state: dict[str, Any] = {
        "has_gpu": False,
        "capability": "AVX512",
        "onednn_version": "v3.12.0",
        "onednn_enabled": True,
        "onednn_bf16": True,
        "attention": Choice("native", "avx2 kernels"),
        "linear": {"bfloat16": Choice("onednn", "prepacked")},
    }
    return check_compute(ComputeState(**{**state, **changes}))


def test_choices_come_with_their_reasons() -> None:
    section = check()
    assert section.problems == []
    assert texts(section)["device"] == "cpu: no GPU"
    assert texts(section)["attention"] == "native: avx2 kernels"
    assert values(section)["linear_bfloat16"] == {"choice": "onednn", "reason": "prepacked"}
    assert texts(section)["onednn"] == "v3.12.0, bfloat16 computed natively"


def test_onednn_without_bfloat16_is_said() -> None:
    assert "no native bfloat16" in texts(check(onednn_bf16=False))["onednn"]


def test_onednn_switched_off_is_a_problem_on_the_cpu() -> None:
    assert "oneDNN is off" in the_problem(check(onednn_enabled=False)).what
    assert check(onednn_enabled=False, has_gpu=True).problems == []


@pytest.mark.parametrize("kernels", [None, object()])
def test_attention_is_what_an_engine_on_the_cpu_chooses(
    monkeypatch: pytest.MonkeyPatch, kernels: Kernels | None
) -> None:
    monkeypatch.setattr(resolving, "find_kernels", lambda: kernels)
    spec = make_spec()
    config = EngineConfig.from_options(kv_cache_memory="1M", dtype="float32", device="cpu")
    chosen = resolve(config, spec, spec.build_kv_layers()).attention_backend
    choice = choose_attention(has_gpu=False, has_kernels=kernels is not None, reason="so it is")
    assert choice == Choice(chosen, "so it is")


def test_a_gpu_takes_the_reference_backend() -> None:
    choice = choose_attention(has_gpu=True, has_kernels=True, reason="avx2 kernels")
    assert choice.name == "torch_ref"
    assert "GPU" in choice.reason


def test_linear_layers_are_described_for_all_kinds_of_weights() -> None:
    choices = describe_linear()
    assert set(choices) == {"bfloat16", "float32", "quantised"}
    assert all(choice.reason for choice in choices.values())
    quantised = choices.pop("quantised")
    assert quantised.name in {"int8", "exact"}
    assert {choice.name for choice in choices.values()} <= {"native", "onednn", "pytorch"}


@pytest.mark.parametrize(("variant", "unit"), [("avx512vnni", "VNNI;"), ("avx2", "no VNNI")])
def test_quantised_weights_are_multiplied_by_what_the_object_has(
    variant: str, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = SimpleNamespace(variant=variant)
    monkeypatch.setattr("forerun.doctor.compute.find_kernels", lambda: kernels)
    assert unit in describe_linear()["quantised"].reason


def test_without_kernels_and_onednn_linear_layers_are_pytorch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("kernels.packed", "doctor.compute"):
        monkeypatch.setattr(f"forerun.{module}.find_kernels", lambda: None)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    choices = {name: choice.name for name, choice in describe_linear().items()}
    assert choices == {"bfloat16": "pytorch", "float32": "pytorch", "quantised": "exact"}

"""What computes: the device, oneDNN, and what attention and linear layers would use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from forerun.doctor.report import Fact, Problem, Section
from forerun.kernels import find_kernels
from forerun.kernels.loader import VARIANTS
from forerun.kernels.packed import PackedWeight
from forerun.layers.linear import Linear, WeightOptions, pack_linears


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen and why."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeState:
    """What PyTorch says, and the choices that follow; `linear` has one per kind of weights."""

    has_gpu: bool
    capability: str
    onednn_version: str | None
    onednn_enabled: bool
    onednn_bf16: bool
    attention: Choice
    linear: Mapping[str, Choice]


def choose_attention(*, has_gpu: bool, has_kernels: bool, reason: str) -> Choice:
    """Return the backend of --attention-backend auto, as engine/resolve.py decides it."""
    if has_gpu:
        return Choice("torch_ref", "the device is a GPU, the native kernels run on the CPU only")
    return Choice("native" if has_kernels else "torch_ref", reason)


def describe_linear() -> dict[str, Choice]:
    """Return what layers/linear.py computes with on the CPU, by weight type."""
    choices = {}
    for dtype in (torch.bfloat16, torch.float32):
        linear = Linear(64, 64, WeightOptions(dtype, torch.device("cpu")))
        if not pack_linears([linear]):
            linear.pack_for_onednn()
        choices[str(dtype).removeprefix("torch.")] = _describe_packing(linear)
    choices["quantised"] = _describe_quantised()
    return choices


def _describe_quantised() -> Choice:
    kernels = find_kernels()
    if kernels is None:
        return Choice("exact", "no native kernels; quantised weights are dequantised at load")
    unit = "VNNI" if "avx512_vnni" in VARIANTS[kernels.variant] else "16-bit products, no VNNI"
    return Choice("int8", f"{kernels.variant} kernels, {unit}; weights stay as stored")


def _describe_packing(linear: Linear) -> Choice:
    if isinstance(linear.packed, PackedWeight):
        return Choice("native", f"{linear.packed.kernels.variant} kernels, for any number of rows")
    if linear.onednn_weight is not None:
        return Choice("onednn", "no native kernels; oneDNN computes this type natively")
    return Choice("pytorch", "F.linear; neither native kernels nor prepacked weights")


def check_compute(state: ComputeState) -> Section:
    """Describe device, libraries and choices."""
    device = Choice(*(("cuda", "a GPU is visible") if state.has_gpu else ("cpu", "no GPU")))
    onednn = {
        "version": state.onednn_version,
        "enabled": state.onednn_enabled,
        "bfloat16": state.onednn_bf16,
    }
    return Section(
        name="compute",
        facts=[
            _as_fact("device", device),
            Fact("pytorch_vectors", state.capability, state.capability),
            Fact("onednn", onednn, _describe_onednn(state)),
            _as_fact("attention", state.attention),
            *(_as_fact(f"linear_{dtype}", choice) for dtype, choice in state.linear.items()),
        ],
        problems=_check_onednn(state),
    )


def _as_fact(name: str, choice: Choice) -> Fact:
    value = {"choice": choice.name, "reason": choice.reason}
    return Fact(name, value, f"{choice.name}: {choice.reason}")


def _describe_onednn(state: ComputeState) -> str:
    if not state.onednn_enabled:
        return "off"
    bf16 = "bfloat16 computed natively" if state.onednn_bf16 else "no native bfloat16 on this CPU"
    return f"{state.onednn_version or 'version unknown'}, {bf16}"


def _check_onednn(state: ComputeState) -> list[Problem]:
    if state.onednn_enabled or state.has_gpu:
        return []
    return [
        Problem(
            what="oneDNN is off: PyTorch was built without it or it was disabled",
            advice="install PyTorch's own CPU wheel, and leave torch.backends.mkldnn enabled.",
        )
    ]

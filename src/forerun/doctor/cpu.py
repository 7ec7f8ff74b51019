"""The processor: its name, the cores this process may use, and the instructions that matter."""

from __future__ import annotations

from collections.abc import Set

from forerun.doctor.report import Fact, Section

# What the kernels, oneDNN or PyTorch choose by, as Linux names it.
INSTRUCTION_SETS = (
    *("avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq"),
    *("avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8"),
)


def count_usable_cores(num_visible: int, quota: float | None) -> int:
    """Return how many threads can run at once: visible CPUs, cut by a CPU-time quota."""
    return num_visible if quota is None else max(1, min(num_visible, int(quota)))


def check_cpu(
    cpu_info: str, flags: Set[str], *, num_visible: int, quota: float | None = None
) -> Section:
    """Describe the processor from the text of /proc/cpuinfo and the cores this process may use."""
    usable = count_usable_cores(num_visible, quota)
    allowed = "no cgroup quota" if quota is None else f"cgroup quota {quota:g}"
    present = [name for name in INSTRUCTION_SETS if name in flags]
    absent = [name for name in INSTRUCTION_SETS if name not in flags]
    model = _find_model_name(cpu_info)
    return Section(
        name="cpu",
        facts=[
            Fact("model", model, model or "unknown"),
            Fact("num_visible_cores", num_visible, f"{num_visible} by affinity"),
            Fact("cpu_quota", quota, allowed),
            Fact("num_usable_cores", usable, str(usable)),
            Fact("instruction_sets", present, " ".join(present) or "none of those Forerun uses"),
            Fact("not_present", absent, " ".join(absent) or "nothing"),
        ],
    )


def _find_model_name(cpu_info: str) -> str | None:
    for line in cpu_info.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return None

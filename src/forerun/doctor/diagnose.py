"""Gather what the checks need from this machine and this process, and run them.

The process is made to look like the engine's first: everything the engine imports is imported and
the kernels are loaded, so that what is mapped here is what would be mapped there.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import resource
from pathlib import Path

import torch

import forerun
from forerun import env
from forerun.config import SchedulerConfig
from forerun.data.bundled import BUNDLED_MODELS
from forerun.doctor.bandwidth import BUFFER_BYTES, measure_read_bandwidth
from forerun.doctor.cgroups import read_cpu_quota, read_memory_limit
from forerun.doctor.compute import ComputeState, check_compute, choose_attention, describe_linear
from forerun.doctor.cpu import check_cpu, count_usable_cores
from forerun.doctor.kernels import KernelState, check_kernels, find_compiler
from forerun.doctor.memory import MemoryState, check_memory, read_amount
from forerun.doctor.models import check_models
from forerun.doctor.report import Fact, Report, Section
from forerun.doctor.threads import ThreadState, check_threads, find_openmp_runtimes
from forerun.engine.resolve import DEFAULT_KV_CACHE_BYTES
from forerun.kernels import explain_kernels, explain_objects, find_kernels
from forerun.kernels.cpu import read_cpu_flags

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def diagnose(*, measure: bool = True) -> Report:
    """Examine this machine; `measure` decides whether memory bandwidth is measured."""
    importlib.import_module("forerun.engine.build")
    find_kernels()
    return Report(
        [
            _check_versions(),
            check_cpu(
                _read("/proc/cpuinfo"),
                read_cpu_flags(),
                num_visible=_count_visible_cores(),
                quota=_read_quota(),
            ),
            check_kernels(_gather_kernels()),
            check_threads(_gather_threads()),
            check_compute(_gather_compute()),
            check_memory(_gather_memory(measure=measure)),
            check_models(env.cache_dir() / "models", BUNDLED_MODELS, home=Path.home()),
        ]
    )


def _check_versions() -> Section:
    versions = {
        "forerun": forerun.__version__,
        "pytorch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    return Section(
        name="versions", facts=[Fact(name, text, text) for name, text in versions.items()]
    )


def _gather_kernels() -> KernelState:
    kernels = find_kernels()
    return KernelState(
        chosen=None if kernels is None else kernels.variant,
        reason=explain_kernels(),
        faults=explain_objects(),
        compiler=find_compiler(env.cxx_compiler()),
    )


def _gather_threads() -> ThreadState:
    return ThreadState(
        num_threads=torch.get_num_threads(),
        num_interop_threads=torch.get_num_interop_threads(),
        num_usable_cores=count_usable_cores(_count_visible_cores(), _read_quota()),
        runtimes=find_openmp_runtimes(_read("/proc/self/maps")),
        own_folder=Path(torch.__file__).parent / "lib",
        variables=env.native_variables(),
    )


def _gather_compute() -> ComputeState:
    has_gpu = torch.cuda.is_available()
    attention = choose_attention(
        has_gpu=has_gpu, has_kernels=find_kernels() is not None, reason=explain_kernels()
    )
    version = re.search(r"MKL-DNN (v\S+)", torch.__config__.show())
    # torch does not annotate this function.
    has_onednn = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    supports_bf16 = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return ComputeState(
        has_gpu=has_gpu,
        capability=torch.backends.cpu.get_cpu_capability(),
        onednn_version=None if version is None else version[1],
        onednn_enabled=has_onednn and bool(torch.backends.mkldnn.enabled),
        onednn_bf16=supports_bf16 is not None and bool(supports_bf16()),
        attention=attention,
        linear=describe_linear(),
    )


def _gather_memory(*, measure: bool) -> MemoryState:
    scheduler = SchedulerConfig()
    mem_info = _read("/proc/meminfo")
    has_room = (read_amount(mem_info, "MemAvailable") or 0) > 2 * BUFFER_BYTES
    return MemoryState(
        mem_info=mem_info,
        limit_bytes=read_memory_limit(_read("/proc/self/cgroup"), _CGROUP_ROOT),
        huge_pages=_read(_HUGE_PAGES) or None,
        max_open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        bandwidth=measure_read_bandwidth() if measure and has_room else None,
        kv_pool_bytes=DEFAULT_KV_CACHE_BYTES,
        num_running=scheduler.max_num_seqs,
        num_clients=scheduler.max_num_seqs + scheduler.max_waiting_requests,
    )


def _count_visible_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _read_quota() -> float | None:
    return read_cpu_quota(_read("/proc/self/cgroup"), _CGROUP_ROOT)


def _read(path: str | Path) -> str:
    """Return the text of a file; empty where the system has no such file."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""

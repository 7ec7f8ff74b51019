"""The native kernels: which object is used, why not the others, and whether one can be built."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass

from forerun.doctor.report import Fact, Problem, Section
from forerun.kernels import KernelsUnavailable

_BUILD = "in the source folder run: python -m pip install --no-deps -e ."
_GIVE_COMPILER = (
    "install a C++ compiler (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++)"
)
_WITHOUT = (
    "Forerun computes in PyTorch instead, slower. The kernels need Linux, a CPU with AVX2 and FMA, "
    "and a process with one OpenMP runtime, PyTorch's libgomp."
)


@dataclass(frozen=True, slots=True)
class Compiler:
    """What a build would call, and the first line of its --version; None if it does not run."""

    command: str
    version: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelState:
    """What the loader found; `faults` has every object, best first, None where it is usable."""

    chosen: str | None
    reason: str
    faults: Mapping[str, KernelsUnavailable | None]
    compiler: Compiler


def find_compiler(given: str | None) -> Compiler:
    """Return the compiler setuptools would call; `given` is the value of CXX."""
    words = shlex.split(given or sysconfig.get_config_var("CXX") or "g++") or ["g++"]
    if shutil.which(words[0]) is None:
        return Compiler(words[0], None)
    try:
        done = subprocess.run(
            [*words, "--version"], capture_output=True, text=True, check=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return Compiler(words[0], None)
    lines = done.stdout.splitlines()
    return Compiler(words[0], lines[0] if lines else "version unknown")


def check_kernels(state: KernelState) -> Section:
    """Say which object is used and why each of the others is not."""
    compiler = state.compiler
    return Section(
        name="kernels",
        facts=[
            Fact("in_use", state.chosen, state.chosen or f"none, PyTorch computes: {state.reason}"),
            *(_describe_object(name, state) for name in state.faults),
            Fact(
                "compiler",
                {"command": compiler.command, "version": compiler.version},
                f"{compiler.command}: {compiler.version or 'not found, or does not run'}",
            ),
        ],
        problems=_find_problems(state),
    )


def _describe_object(name: str, state: KernelState) -> Fact:
    fault = state.faults[name]
    if fault is not None:
        text = f"not usable: {fault}"
    elif name == state.chosen:
        text = "in use: the best this CPU runs"
    elif state.chosen is None:
        text = "usable, but not reached: a better object comes first and cannot be used"
    else:
        text = f"usable; {state.chosen} is better"
    value = {"usable": fault is None, "reason": text}
    return Fact(f"object_{name}", value, text)


def _find_problems(state: KernelState) -> list[Problem]:
    names = list(state.faults)
    better = names if state.chosen is None else names[: names.index(state.chosen)]
    broken = {
        name: fault
        for name in better
        if (fault := state.faults[name]) is not None and fault.can_rebuild
    }
    if broken:
        reasons = "; ".join(f"{name}: {fault}" for name, fault in broken.items())
        using = state.chosen or "PyTorch"
        what = f"better kernels than {using} cannot be used ({reasons})"
        return [Problem(what=what, advice=_advise_build(state.compiler))]
    if state.chosen is None:
        return [Problem(what=f"no native kernels: {state.reason}", advice=_WITHOUT)]
    return []


def _advise_build(compiler: Compiler) -> str:
    if compiler.version is None:
        return f"{_GIVE_COMPILER}; {compiler.command} was not found or does not run. Then {_BUILD}"
    return f"{_BUILD} (compiler: {compiler.version}; avx512bf16 needs GCC 10 or newer)"

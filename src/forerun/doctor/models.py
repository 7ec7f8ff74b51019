"""The bundled models in the cache folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from forerun.data.bundled import BundledModel
from forerun.doctor.report import Fact, Section, format_bytes


def check_models(folder: Path, models: Mapping[str, BundledModel], *, home: Path) -> Section:
    """List which bundled models are there; the others are fetched when they are first used."""
    found = {name: _find_size(folder / model.file_name) for name, model in models.items()}
    facts = [Fact("folder", str(folder), shorten(folder, home))]
    for name, model in models.items():
        size = found[name]
        facts.append(Fact(name, {"bytes": size}, _describe(size, model)))
    return Section(name="models", facts=facts)


def shorten(path: Path, home: Path) -> str:
    """Return a path with ~ for the home folder."""
    return str(Path("~") / path.relative_to(home)) if path.is_relative_to(home) else str(path)


def _find_size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _describe(size: int | None, model: BundledModel) -> str:
    if size is None:
        return f"not fetched ({format_bytes(model.num_bytes)})"
    if size != model.num_bytes:
        return f"incomplete: {size} of {model.num_bytes} bytes; fetched again when used"
    return f"{model.file_name}, {format_bytes(size)}"

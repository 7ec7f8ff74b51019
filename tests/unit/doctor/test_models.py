"""Bundled models: there, incomplete, or not fetched yet."""

from __future__ import annotations

from pathlib import Path

from forerun.data.bundled import BundledModel
from forerun.doctor.models import check_models
from unit.doctor.sections import texts, values


def make_model(file_name: str, num_bytes: int) -> BundledModel:
    return BundledModel(
        file_name=file_name, num_bytes=num_bytes, sha256="", packages=("p==1",), member="*"
    )


def test_models_are_listed_with_what_is_there_of_them(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "models"
    folder.mkdir(parents=True)
    (folder / "whole.gguf").write_bytes(bytes(2**20))
    (folder / "part.gguf").write_bytes(bytes(7))
    models = {
        "whole": make_model("whole.gguf", 2**20),
        "part": make_model("part.gguf", 2**20),
        "absent": make_model("absent.gguf", 2**31),
    }
    section = check_models(folder, models, home=tmp_path)
    assert section.problems == []
    assert texts(section) == {
        "folder": "~/cache/models",
        "whole": "whole.gguf, 1 MiB",
        "part": "incomplete: 7 of 1048576 bytes; fetched again when used",
        "absent": "not fetched (2.0 GiB)",
    }
    assert values(section)["folder"] == str(folder)
    assert values(section)["absent"] == {"bytes": None}


def test_a_folder_elsewhere_is_shown_in_full(tmp_path: Path) -> None:
    section = check_models(tmp_path / "models", {}, home=tmp_path / "home")
    assert texts(section)["folder"] == str(tmp_path / "models")

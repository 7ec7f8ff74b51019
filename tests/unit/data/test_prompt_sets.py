"""The committed prompts, and the evaluation set that is assembled from packages."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from forerun.data import build_prompt_set, package_files
from forerun.data.bundled import fetch_default_model
from forerun.errors import ConfigError
from forerun.tokenization import load_tokenizer


@pytest.mark.network
def test_committed_prompts_are_distinct_and_cover_short_and_long() -> None:
    prompts = build_prompt_set("small")
    tokenizer = load_tokenizer(fetch_default_model())
    lengths = [len(tokenizer.encode(p["messages"][-1]["content"])) for p in prompts]
    assert len({prompt["id"] for prompt in prompts}) == 24
    assert min(lengths) >= 10
    assert max(lengths) <= 300
    assert sum(length > 90 for length in lengths) >= 6
    assert all(tokenizer.encode_chat(prompt["messages"]) for prompt in prompts)
    assert {p["category"] for p in prompts} >= {"chat", "code", "math", "summarise", "copy"}


def test_unknown_set_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'evaluations'; did you mean 'evaluation'"):
        build_prompt_set("evaluations")


def test_changed_package_content_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    monkeypatch.setattr(
        package_files, "copy_member", lambda archive, pattern, out: out.write(b"else")
    )
    monkeypatch.setattr(
        package_files, "open_package", lambda package, work_dir: work_dir_of(tmp_path)
    )
    with pytest.raises(ConfigError, match="not the expected one"):
        build_prompt_set("evaluation")
    assert [entry.name for entry in (tmp_path / "prompts").iterdir()] == ["lock"]


def work_dir_of(folder: Path) -> object:
    """Return an open context manager that stands for a downloaded package."""
    return (folder / "package").open("wb")


@pytest.mark.slow
@pytest.mark.network
def test_evaluation_set_is_the_same_every_time() -> None:
    prompts = build_prompt_set("evaluation")
    assert prompts == build_prompt_set("evaluation")
    counts = Counter(prompt["category"] for prompt in prompts)
    assert counts == {"chat": 60, "code": 60, "math": 40, "summarise": 40}
    assert len({prompt["id"] for prompt in prompts}) == 200
    assert all(prompt["messages"][0]["content"].strip() for prompt in prompts)

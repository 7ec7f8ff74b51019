"""What a check says: facts for people and for programs, and problems with what to do."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

# What the names of JSON values carry and people read beside the number.
_UNITS = re.compile(r"^num_|_bytes(_per_s)?$")


@dataclass(frozen=True, slots=True)
class Fact:
    """One line. `value` is what JSON shows, `text` what people read."""

    name: str
    value: Any
    text: str

    @property
    def label(self) -> str:
        """Return the name as people read it."""
        return _UNITS.sub("", self.name).replace("_", " ")


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Something that costs speed or memory and that somebody can change."""

    what: str
    advice: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """The facts of one area and the problems found in it."""

    name: str
    facts: list[Fact]
    problems: list[Problem] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Report:
    """Every section, in the order shown."""

    sections: list[Section]

    @property
    def problems(self) -> list[tuple[str, Problem]]:
        """Return every problem with the name of its section."""
        return [(section.name, item) for section in self.sections for item in section.problems]

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values: one object per section, problems last."""
        areas = {
            section.name: {fact.name: fact.value for fact in section.facts}
            for section in self.sections
        }
        problems = [
            {"section": name, "problem": problem.what, "advice": problem.advice}
            for name, problem in self.problems
        ]
        return {**areas, "problems": problems}


def format_bytes(num_bytes: float) -> str:
    """Return a size in GiB or MiB."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.1f} GiB"
    return f"{num_bytes / 2**20:.0f} MiB"

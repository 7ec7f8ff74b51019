"""Read sections in tests."""

from __future__ import annotations

from typing import Any

from forerun.doctor.report import Problem, Section


def texts(section: Section) -> dict[str, str]:
    return {fact.name: fact.text for fact in section.facts}


def values(section: Section) -> dict[str, Any]:
    return {fact.name: fact.value for fact in section.facts}


def the_problem(section: Section) -> Problem:
    """Return the only problem of a section."""
    (problem,) = section.problems
    return problem

"""Environment variables: what is set for native libraries, and what is left to the user."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

READ = "import forerun, os; print(os.environ.get('GOMP_SPINCOUNT'))"


def read_spin_count(**variables: str) -> str:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-c", READ]
    environment = inherited | variables
    return subprocess.check_output(command, env=environment, text=True).strip()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "1000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "active"}, "None"),
    ],
)
def test_waiting_threads_sleep_soon_unless_the_user_decided(
    variables: dict[str, str], expected: str
) -> None:
    assert read_spin_count(**variables) == expected

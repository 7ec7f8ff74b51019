"""`forerun doctor` as a process of its own, on the machine the tests run on."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

import forerun
from forerun.kernels import find_kernels
from system.server_process import build_environment


def run_doctor(
    *options: str, cores: set[int] | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the command, on some of the cores if asked."""
    return subprocess.run(
        [sys.executable, "-m", "forerun", "doctor", *options],
        env=build_environment(**variables),
        preexec_fn=None if cores is None else lambda: os.sched_setaffinity(0, cores),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_json_describes_this_machine() -> None:
    done = run_doctor("--json", "--no-measure")
    report = json.loads(done.stdout)
    assert done.returncode == (1 if report["problems"] else 0)
    assert report["versions"]["forerun"] == forerun.__version__
    assert report["versions"]["pytorch"] == torch.__version__
    kernels = find_kernels()
    assert report["kernels"]["in_use"] == (kernels.variant if kernels else None)
    assert report["compute"]["attention"]["choice"] in ("native", "torch_ref")
    assert report["threads"]["num_threads"] == 1
    assert report["threads"]["variables"]["OMP_NUM_THREADS"] == "1"
    assert report["memory"]["read_bandwidth_bytes_per_s"] is None
    assert "smollm2-135m-instruct" in report["models"]


def test_more_threads_than_cores_are_reported_last_with_what_to_do() -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core only: PyTorch starts no second thread")
    done = run_doctor("--no-measure", cores={cores[0]}, OMP_NUM_THREADS="2")
    assert done.returncode == 1, done.stderr
    assert "2 on 1 usable cores: OMP_NUM_THREADS set" in done.stdout
    verdict = done.stdout.partition("problem 1, ")[2]
    assert "threads: 2 threads for 1 usable cores" in verdict
    assert "what to do: give --num-threads 1" in verdict


@pytest.mark.parametrize("option", ["--jason", "extra"])
def test_a_mistake_is_exit_code_2(option: str) -> None:
    done = run_doctor(option)
    assert (done.returncode, done.stdout) == (2, "")

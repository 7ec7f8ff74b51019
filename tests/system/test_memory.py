"""What a loaded model keeps resident: the file's weights once, the K/V pool, and little else."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from forerun.data.bundled import fetch_default_model
from forerun.kernels import explain_kernels, find_kernels

POOL_BYTES = 64 * 2**20
# Code and buffers beyond imports, weights and pool.
ALLOWED_BYTES = 250 * 2**20

_PROGRAM = f"""
import json
from pathlib import Path

import torch

from forerun import LLM, SamplingParams


def read_resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


imported = read_resident()
llm = LLM(kv_cache_memory="{POOL_BYTES}", max_model_len=512)
llm.generate(["Once upon a time"], SamplingParams(max_tokens=8, temperature=0.0))
print(json.dumps({{"excess": read_resident() - imported, "mode": llm.info["quantization"]}}))
"""


@pytest.mark.network
@pytest.mark.skipif(find_kernels() is None, reason=explain_kernels())
def test_weights_are_resident_once_as_the_file_holds_them() -> None:
    file_bytes = fetch_default_model().stat().st_size
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["mode"] == "int8"
    assert told["excess"] < file_bytes + POOL_BYTES + ALLOWED_BYTES

"""The API process stays free of torch and transformers; a fresh interpreter proves it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]

IMPORTS = """
import forerun.server.app, forerun.transport.async_engine, forerun.cli, forerun.tokenization
"""
SERVES = """
import asyncio
from fake_engine import open_client

async def main():
    async with open_client() as client:
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200 and "[DONE]" in answer.text, answer.text
        assert (await client.get("/metrics")).status_code == 200

asyncio.run(main())
"""
CHECK = """
import sys
heavy = {"torch", "transformers"} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.parametrize("script", [IMPORTS, SERVES], ids=["imports", "serves"])
def test_the_api_process_never_imports_torch(script) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script + CHECK],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(TESTS), "PATH": ""},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr

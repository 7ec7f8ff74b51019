"""What a mistake on the command line looks like from outside: one sentence on stderr, exit code 2.

Each case is `forerun serve` as a process of its own, on files broken in one way. Those that need
the engine to find out import torch; the others end before that.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from system.server_process import build_environment
from tiny_models import make_config


def fail(*argv: str) -> str:
    """Run a command that must fail, and return what it said."""
    ended = subprocess.run(
        [sys.executable, "-m", "forerun", *argv],
        env=build_environment(FORERUN_LOG_LEVEL="ERROR"),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
    lines = ended.stderr.splitlines()
    assert len(lines) == 1, ended.stderr
    assert lines[0].startswith("forerun: ")
    assert lines[0].endswith(".")
    return lines[0]


def fail_to_serve(*options: str) -> str:
    return fail("serve", "--port", "0", *options)


def make_folder(folder: Path, **overrides: object) -> Path:
    """Write a model folder in which all is well but that the weights are missing."""
    (folder / "config.json").write_text(json.dumps(make_config(**overrides)))
    tokenizer = Tokenizer(models.BPE(vocab={f"t{i}": i for i in range(97)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file({"model.norm.weight": np.ones(48, np.float32)}, folder / "model.safetensors")
    return folder


def write_gguf(path: Path) -> Path:
    """Write a GGUF file with one tensor of 4 KiB at its end."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(97)])
    writer.add_tensor("token_embd.weight", np.ones((32, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["/no/such/folder"], "'/no/such/folder' is neither an existing folder nor"),
        (["smollm2-135m"], "did you mean 'smollm2-135m-instruct'?"),
        (["--max-num-sequences", "8"], "did you mean '--max-num-seqs'?"),
        (["--speculative-config", "{method"], "--speculative-config is not valid JSON"),
        (["--speculative-config", '{"k": 5}'], "unknown speculative_config key 'k'"),
        (
            ["--max-num-batched-tokens", "8", "--max-num-seqs", "9"],
            "--max-num-batched-tokens (8) must be at least --max-num-seqs (9)",
        ),
    ],
)
def test_a_wrong_option_is_named(options, said) -> None:
    assert said in fail_to_serve(*options)


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"127.0.0.1:{port} is in use" in fail("serve", "--port", port)


def test_a_truncated_gguf_file_is_named(tmp_path) -> None:
    path = write_gguf(tmp_path / "cut.gguf")
    path.write_bytes(path.read_bytes()[:-100])
    assert f"{path} is truncated or corrupt: tensor token_embd.weight" in fail_to_serve(str(path))


def test_a_file_that_only_claims_to_be_gguf_is_named(tmp_path) -> None:
    path = tmp_path / "readme.gguf"
    path.write_text("This is not a model.\n" * 100)
    assert f"{path} is not a GGUF file" in fail_to_serve(str(path))


def test_a_folder_without_a_configuration_is_named(tmp_path) -> None:
    assert f"{tmp_path} has no config.json" in fail_to_serve(str(tmp_path))


def test_an_unsupported_architecture_is_named(tmp_path) -> None:
    folder = make_folder(tmp_path, architectures=["MambaForCausalLM"])
    said = fail_to_serve(str(folder))
    assert "architecture 'MambaForCausalLM' is not supported; supported are LlamaFor" in said


def test_missing_tensors_are_named(tmp_path) -> None:
    said = fail_to_serve(str(make_folder(tmp_path)))
    assert f"{tmp_path} lacks tensors " in said
    assert "model.embed_tokens.weight" in said


def test_a_context_longer_than_the_model_is_refused(tmp_path) -> None:
    said = fail_to_serve(str(make_folder(tmp_path)), "--max-model-len", "513")
    assert "--max-model-len 513 is longer than the model's context of 512 tokens" in said

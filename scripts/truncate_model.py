"""Write the first layers of a Llama-family model as a Hugging Face folder: a draft model to try.

    python scripts/truncate_model.py OUT --layers 10 [--model smollm2-135m-instruct]

Weights are dequantised to bfloat16; embeddings, final norm and head stay. Without training such a
model guesses poorly, but it has the target's vocabulary, real probabilities and a known cost.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from forerun.config import DEFAULT_MODEL
from forerun.data.bundled import resolve_model_path
from forerun.models.decoder import DecoderModel
from forerun.models.loader import load_model
from forerun.models.spec import ModelSpec
from forerun.tokenization import Tokenizer, load_tokenizer


def main() -> None:
    """Read the arguments and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--layers", type=int, required=True, help="layers to keep")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="folder, GGUF file or bundled name")
    args = parser.parse_args()
    path = resolve_model_path(args.model)
    model = load_model(path, dtype=torch.bfloat16, pack=False)
    if model.spec.architecture != "LlamaForCausalLM" or not 1 <= args.layers <= len(model.layers):
        parser.error(f"--model must be a Llama with at least {args.layers} layers")
    args.out.mkdir(parents=True, exist_ok=True)
    save_file(select_weights(model, args.layers), args.out / "model.safetensors")
    write_json(args.out / "config.json", build_config(model.spec, args.layers))
    write_tokenizer(args.out, load_tokenizer(path))


def select_weights(model: DecoderModel, num_layers: int) -> dict[str, torch.Tensor]:
    """Return the weights of the first layers and of what is no layer, by Hugging Face's names."""
    weights = {}
    for name, slot in model.slots().items():
        if not name.startswith("layers.") or int(name.split(".")[1]) < num_layers:
            weight = slot.destination.detach().reshape(-1, *slot.shape)[0]
            weights[model.hf_name(name)] = weight.clone().contiguous()
    return weights


def build_config(spec: ModelSpec, num_layers: int) -> dict[str, Any]:
    """Return config.json."""
    return {
        "architectures": [spec.architecture],
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_model_len,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.layers[0].rope.theta,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "hidden_act": spec.activation,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": list(spec.eos_token_ids),
        "torch_dtype": "bfloat16",
    }


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Write tokenizer.json, and the names of the special tokens beside it."""
    tokenizer.save(folder / "tokenizer.json")
    named = {
        "bos_token": tokenizer.bos_token_id,
        "eos_token": min(tokenizer.eos_token_ids, default=None),
    }
    names = {key: tokenizer.id_to_token(i) for key, i in named.items() if i is not None}
    write_json(folder / "tokenizer_config.json", names)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write one JSON file."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

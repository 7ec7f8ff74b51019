"""From a speculative configuration to a block drafter: find, check, load.

Refusals are ConfigErrors.
The configuration is read first, because the pool must know the draft layers before anything loads;
whether the drafter fits the target is known when both meet.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from forerun.drafters.base import DrafterLoading
from forerun.drafters.draft_sampling import DraftRules
from forerun.drafters.dspark.backbone import Backbone, pack
from forerun.drafters.dspark.checkpoint import load_dspark_tensors, read_dspark_config
from forerun.drafters.dspark.choosing import BlockHeads
from forerun.drafters.dspark.config import DSparkConfig
from forerun.drafters.dspark.context import ContextProjection
from forerun.drafters.dspark.drafter import DSparkDrafter, DSparkParts
from forerun.drafters.dspark.heads import ConfidenceHead, build_markov_head
from forerun.drafters.locate import find_drafter_path
from forerun.errors import ConfigError
from forerun.layers.linear import WeightOptions
from forerun.logs import get_logger
from forerun.speculative_config import SpeculativeConfig

logger = get_logger(__name__)


def read_config(config: SpeculativeConfig) -> DSparkConfig:
    """Read what the drafter is made of; raises ConfigError that names the key."""
    try:
        dspark = read_dspark_config(_find_folder(config))
    except ConfigError as error:
        raise ConfigError(f"speculative_config 'model': {error}") from error
    if dspark.method != config.method:
        raise ConfigError(
            f"speculative_config 'model': {config.model} holds a {dspark.method} drafter, got "
            f'method {config.method!r}; give "method": "{dspark.method}".'
        )
    if dspark.flavour != "qwen3":
        raise ConfigError(
            f"speculative_config 'model': {config.model} has layers of the {dspark.flavour} kind, "
            "which can be read but not served; give a drafter with Qwen3 layers."
        )
    most = dspark.block_size
    if config.num_speculative_tokens > most:
        raise ConfigError(
            f"num_speculative_tokens is {config.num_speculative_tokens}, but a block of the "
            f"drafter {config.model} has {most} drafts; give at most {most}."
        )
    return dspark


def _find_folder(config: SpeculativeConfig) -> Path:
    path = find_drafter_path(config)
    assert path is not None, "methods with weights have a model"
    return path


def load_dspark(config: SpeculativeConfig, loading: DrafterLoading) -> DSparkDrafter:
    """Load a drafter for methods dspark and dflash; raises ConfigError."""
    dspark = read_config(config)
    if dspark.max_model_len < loading.max_model_len:
        logger.warning(
            "the drafter's context of %d tokens is shorter than the target's %d: requests do not "
            "draft beyond it",
            dspark.max_model_len,
            loading.max_model_len,
        )
    tensors = load_dspark_tensors(_find_folder(config), dspark)
    is_coupled = config.rejection_sample_method == "coupled"
    return DSparkDrafter(
        build_parts(
            dspark,
            tensors,
            WeightOptions(loading.dtype, loading.device),
            is_quantised=loading.quantization != "exact",
        ),
        max_speculative_tokens=config.num_speculative_tokens,
        rules=DraftRules(
            default_method="coupled" if is_coupled else "standard",
            is_greedy=config.draft_sample_method == "greedy",
        ),
    )


def build_parts(
    config: DSparkConfig,
    tensors: Mapping[str, Tensor],
    options: WeightOptions,
    *,
    is_quantised: bool,
) -> DSparkParts:
    """Return the modules of a checkpoint's tensors; linear layers are Q8_0 if told so."""
    backbone = Backbone(config, options, is_quantised=is_quantised)
    context = ContextProjection(config, options)
    backbone.fill(tensors)
    context.fill(tensors)
    pack([*backbone.list_linears(), *context.list_linears()], is_quantised=is_quantised)
    return DSparkParts(
        config=config,
        backbone=backbone.eval(),
        context=context.eval(),
        heads=_build_heads(config, tensors, options),
    )


def _build_heads(
    config: DSparkConfig, tensors: Mapping[str, Tensor], options: WeightOptions
) -> BlockHeads:
    with torch.device("meta"):
        markov = build_markov_head(config)
        confidence = ConfidenceHead(config) if config.has_confidence_head else None
    _assign(markov, tensors, "markov_head.", options)
    # A sum of hundreds of products decides how deep to verify: in float32, whatever the model's.
    _assign(confidence, tensors, "confidence_head.", WeightOptions(torch.float32, options.device))
    d2t = tensors["d2t"].to(options.device) if config.has_reduced_vocab else None
    return BlockHeads.build(markov, confidence, d2t, config.vocab_size)


def _assign(
    module: nn.Module | None, tensors: Mapping[str, Tensor], prefix: str, options: WeightOptions
) -> None:
    """Fill a module made without memory."""
    if module is None:
        return
    own = {
        name.removeprefix(prefix): tensor.to(options.device, options.dtype)
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    module.load_state_dict(own, assign=True)
    module.requires_grad_(requires_grad=False)

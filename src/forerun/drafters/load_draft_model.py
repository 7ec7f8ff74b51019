"""From a speculative configuration to a draft model: find, check, load. Refusals are ConfigErrors.

The spec is read first, because the pool must know the draft model's layers before anything loads.
"""

from __future__ import annotations

from forerun.data.bundled import resolve_model_path
from forerun.drafters.base import DrafterLoading
from forerun.drafters.draft_model import DraftModelDrafter
from forerun.drafters.draft_sampling import DraftRules
from forerun.drafters.vocabulary import check_same_vocabulary, check_vocab_size
from forerun.errors import ConfigError
from forerun.logs import get_logger
from forerun.models.loader import load_model, read_model_spec
from forerun.models.spec import FLOAT_TYPES, ModelSpec
from forerun.speculative_config import SpeculativeConfig
from forerun.tokenization import load_tokenizer

logger = get_logger(__name__)


def read_draft_spec(config: SpeculativeConfig) -> ModelSpec:
    """Read what the draft model is made of; raises ConfigError that names the key."""
    try:
        return read_model_spec(resolve_model_path(config.model))
    except ConfigError as error:
        raise ConfigError(f"speculative_config 'model': {error}") from error


def load_draft_model(config: SpeculativeConfig, loading: DrafterLoading) -> DraftModelDrafter:
    """Load the draft model as the target is loaded; raises ConfigError where they do not match."""
    spec = read_draft_spec(config)
    path = resolve_model_path(config.model)
    check_vocab_size(loading.vocab_size, spec.vocab_size)
    check_same_vocabulary(loading.tokenizer, load_tokenizer(path))
    if spec.max_model_len < loading.max_model_len:
        logger.warning(
            "the draft model's context of %d tokens is shorter than the target's %d: requests do "
            "not draft beyond it",
            spec.max_model_len,
            loading.max_model_len,
        )
    model = load_model(
        path,
        dtype=loading.dtype,
        device=loading.device,
        quantization=_choose_quantization(loading.quantization, spec),
    )
    is_coupled = config.rejection_sample_method == "coupled"
    return DraftModelDrafter(
        model,
        max_speculative_tokens=config.num_speculative_tokens,
        rules=DraftRules(
            default_method="coupled" if is_coupled else "standard",
            is_greedy=config.draft_sample_method == "greedy",
        ),
    )


def _choose_quantization(mode: str, spec: ModelSpec) -> str:
    """Return the target's mode, except that weights stored as floats are not int8."""
    is_float = spec.quantization is None or spec.quantization in FLOAT_TYPES
    return "exact" if mode == "int8" and is_float else mode

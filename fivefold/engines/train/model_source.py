"""From `model:` in the configuration to a decoder with values, and its tokenizer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Size, Tensor

from fivefold.core.config import ModelSection
from fivefold.core.errors import ConfigError
from fivefold.model.config import ModelConfig
from fivefold.model.decoder import Decoder, initial_value
from fivefold.model.families import parse_config
from fivefold.text.tokenizer import Tokenizer
from fivefold.weights.check import check_tensors
from fivefold.weights.open import open_source
from fivefold.weights.source import ModelSource

FirstValue = Callable[[str, Size], Tensor]


def read_model_config(section: ModelSection) -> ModelConfig:
    """The decoder's shape. Raises ConfigError or WeightsError naming the field that is wrong."""
    if section.source is not None:
        return open_source(section.source).config
    assert section.config is not None
    return parse_config(section.config)


def model_tokenizer(section: ModelSection) -> Callable[[], Tokenizer] | None:
    """How to get the model's own tokenizer; None when the model is only a configuration."""
    if section.source is None:
        return None
    return open_source(section.source).tokenizer


def first_values(section: ModelSection, config: ModelConfig, seed: int) -> FirstValue:
    """The fp32 value that training starts from, by name and shape: the source's, or random.

    Raises WeightsError, before anything is read, when the source's tensors are not the model's.
    """
    if section.source is not None:
        source = open_source(section.source)
        if _use_weights(section, source):
            shapes = {
                n: tuple(p.shape) for n, p in Decoder(config, device="meta").named_parameters()
            }
            check_tensors(source, shapes)
            return lambda name, shape: source.get(name, torch.float32)
    return lambda name, shape: initial_value(name, shape, config, seed)


def check_tokenizer(section: ModelSection, tokenizer: str) -> None:
    """Raise ConfigError for a new tokenizer under weights that were learnt with another."""
    if section.source is None or not tokenizer.startswith("bpe:"):
        return
    if _use_weights(section, open_source(section.source)):
        raise ConfigError(
            f"data.tokenizer={tokenizer} numbers its tokens otherwise than the model whose weights "
            f"training starts from ({section.source})",
            "leave data.tokenizer=auto, or set model.init=random",
        )


def check_vocabulary(tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Raise ConfigError when the tokenizer can name tokens that the model has no row for."""
    if tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, "
            f"but the model's vocab_size is {config.vocab_size}",
            "raise model.config.vocab_size, or choose another data.tokenizer",
        )


def _use_weights(section: ModelSection, source: ModelSource) -> bool:
    if section.init == "weights" and not source.has_weights:
        raise ConfigError(
            f"{section.source} holds no weights", "use model.init: random, or another source"
        )
    return section.init != "random" and source.has_weights

"""From `model:` in the configuration to a decoder with values, and its tokenizer."""

from __future__ import annotations

from collections.abc import Callable

from fivefold.core.config import ModelSection
from fivefold.core.errors import ConfigError
from fivefold.model.config import ModelConfig
from fivefold.model.decoder import Decoder
from fivefold.model.families import parse_config
from fivefold.text.tokenizer import Tokenizer
from fivefold.weights.open import load_decoder, open_source
from fivefold.weights.source import ModelSource


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


def build_decoder(section: ModelSection, config: ModelConfig, seed: int) -> Decoder:
    """A decoder in fp32 on the host, with the source's weights or random values from `seed`."""
    if section.source is not None and _use_weights(section, open_source(section.source)):
        return load_decoder(section.source)
    decoder = Decoder(config)
    decoder.initialize(seed)
    return decoder


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

"""What training starts from: values by name, and tokenizers that fit them."""

from __future__ import annotations

import pytest
import torch

from fivefold.core.config import ModelSection
from fivefold.core.errors import ConfigError
from fivefold.engines.train.model_source import check_tokenizer, first_values, read_model_config
from fivefold.model.decoder import Decoder

TINY = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 32, "tie_word_embeddings": False,
}  # fmt: skip


def test_random_values_are_those_of_a_decoder() -> None:
    section = ModelSection(config=TINY)
    config = read_model_config(section)
    value = first_values(section, config, 3)
    decoder = Decoder(config)
    decoder.initialize(3)
    for name, parameter in decoder.named_parameters():
        assert torch.equal(value(name, parameter.shape), parameter)


def test_a_new_tokenizer_is_refused_under_learnt_weights() -> None:
    with pytest.raises(ConfigError, match="bpe:512 numbers its tokens otherwise") as caught:
        check_tokenizer(ModelSection(source="smollm2"), "bpe:512")
    assert "data.tokenizer=auto" in caught.value.mend
    check_tokenizer(ModelSection(source="smollm2", init="random"), "bpe:512")
    check_tokenizer(ModelSection(source="smollm2"), "auto")
    check_tokenizer(ModelSection(config=TINY), "bpe:512")

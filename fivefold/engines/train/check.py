"""What training would refuse once its ranks run, asked before, without importing what trains."""

from __future__ import annotations

from fivefold.axes.check import check_microbatches, check_model
from fivefold.axes.dp.compression.choose import check_compression
from fivefold.core.config import RunConfig
from fivefold.engines.train.model_source import check_tokenizer, read_model_config
from fivefold.model.config import ModelConfig


def check_run(config: RunConfig) -> ModelConfig:
    """What training would refuse later, refused before any rank starts; the model's shape.

    Raises ConfigError or WeightsError for the model, LayoutError for a layout that does not fit it
    or the batch.
    """
    layout, train = config.layout, config.train
    model_config = read_model_config(config.model)
    check_tokenizer(config.model, config.data.tokenizer)
    check_model(layout, model_config, config.data.sequence_length)
    check_compression(config.communication, layout)
    check_microbatches(layout, train.global_batch // (train.micro_batch * layout.dp))
    return model_config

"""What a step's record says of experts: the worst layer in front, all layers behind."""

from __future__ import annotations

from fivefold.engines.train.recorder import expert_metrics
from fivefold.model.load import LayerLoad


def test_the_worst_layer_stands_for_all() -> None:
    even, crowded = LayerLoad((4, 4, 4, 4), 0), LayerLoad((16, 0, 0, 0), 3)
    layers = {"layers.0": even.as_dict(), "layers.1": crowded.as_dict()}
    found = expert_metrics(layers)
    assert found["expert_max_over_mean"] == 4.0
    assert found["expert_entropy"] == 0.0
    assert found["expert_dropped"] == 3
    assert found["experts"] == layers


def test_a_dense_model_says_nothing() -> None:
    assert expert_metrics({}) == {}

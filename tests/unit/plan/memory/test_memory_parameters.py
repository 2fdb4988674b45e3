"""Parameters from the shape are those of the decoder, whole and as other axes cut them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fivefold.core.layout import Layout
from fivefold.model.config import ModelConfig
from fivefold.model.decoder import Decoder
from fivefold.model.families import parse_config
from fivefold.plan.memory.depth import layer_costs, stage_layers
from fivefold.plan.memory.explain import total_parameters
from fivefold.plan.memory.flight import STEADY, Flight, flights
from fivefold.plan.memory.parameters import layer_weights, outer_weights
from fivefold.plan.models.gpt import gpt
from fivefold.plan.models.parse import shape as find
from fivefold.plan.shape import ModelShape
from tests.unit.model.model_cases import OWN as DENSE
from tests.unit.model.model_cases import config
from tests.unit.model.moe_model_cases import OWN as SPARSE
from tests.unit.model.moe_model_cases import hf_config

FAMILIES = [*DENSE, *SPARSE]


def of(family: str) -> ModelConfig:
    return config(family) if family in DENSE else parse_config(hf_config(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_of_a_decoder(family: str) -> None:
    model = of(family)
    shape = ModelShape(family, model)
    wanted = {n: tuple(p.shape) for n, p in Decoder(model, device="meta").named_parameters()}
    found = {}
    for index in range(model.num_layers):
        for weight in layer_weights(shape, model.is_sparse(index)):
            found[f"layers.{index}.{weight.name}"] = weight
    for part in outer_weights(shape).values():
        found |= {weight.name: weight for weight in part}
    assert found.keys() == wanted.keys()
    for name, dims in wanted.items():
        weight = found[name]
        assert (weight.rows, weight.row) == (dims[0], math.prod(dims[1:])), name
        assert weight.matrix == (len(dims) > 1) and weight.expert == (".experts." in name)
    assert total_parameters(shape) == sum(math.prod(dims) for dims in wanted.values())


def test_gpt_by_its_formula() -> None:
    """12 L h^2 (1 + 13/(12h) + (V + s)/(12 L h)) (Narayanan et al. 2021): and the last norm."""
    layers, hidden, words, positions = 24, 2304, 51200, 2048
    shape = gpt("1.7B", layers, hidden, 24)
    by_paper = 12 * layers * hidden**2 + 13 * layers * hidden + (words + positions) * hidden
    assert total_parameters(shape) == by_paper + 2 * hidden


@pytest.mark.parametrize("family", ["llama", "qwen2", "deepseek_v3"])
def test_layers_cost_what_training_splits_them_by(family: str) -> None:
    from fivefold.axes.pp.split import estimate_costs, split_layers

    model = of(family)
    wanted = estimate_costs(Decoder(model, device="meta"), 64)
    shape = ModelShape(family, model)
    assert layer_costs(shape, 64) == wanted
    assert stage_layers(shape, 64, 2) == split_layers(wanted, 2)


@pytest.mark.parametrize("schedule", ["zb-h1", "zbv", "dualpipe", "dualpipe-v", "interleaved"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_more_micro_batches_keep_no_more(
    schedule: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flights are found with few micro-batches, since schedules come to a steady state."""
    virtual = 2 if schedule == "interleaved" else 1
    few = flights.__wrapped__(schedule, ranks, 3 * STEADY * ranks, virtual)
    monkeypatch.setattr("fivefold.plan.memory.flight.STEADY", 100)
    many = flights.__wrapped__(schedule, ranks, 3 * STEADY * ranks, virtual)
    assert [highest(f) for f in few] == [highest(f) for f in many]


def highest(flight: Flight) -> tuple[int, int]:
    """The most kept, and the most kept or put aside."""
    both = [(sum(m.kept), sum(m.kept) + sum(m.aside)) for m in flight.moments]
    return max(kept for kept, _ in both), max(each for _, each in both)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zb-h1", "zbv", "dualpipe"])
def test_flights_are_what_a_timeline_has_in_flight(schedule: str) -> None:
    from fivefold.axes.pp.build import build_schedule
    from fivefold.axes.pp.simulate import simulate

    timeline = simulate(build_schedule(schedule, 4, 8))
    for rank, flight in enumerate(flights(schedule, 4, 8, 1)):
        before = [sum(m.kept) + sum(m.aside) + (m.kind == "F") for m in flight.moments]
        assert max(before) == timeline.peak_in_flight(rank)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("llama-3.1-70b", 70_553_706_496), ("deepseek-v3", 671_026_404_352), ("13B", None)],
)
def test_published_models(name: str, sizes: int | None) -> None:
    shape: Any = find(name)
    total = total_parameters(shape)
    assert total == sizes if sizes else 12.5e9 < total < 13.6e9
    assert Layout() == Layout()

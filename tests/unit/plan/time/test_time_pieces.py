"""What a step's time is put together from, each against its own arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fivefold.axes.pp.build import SCHEDULES, build_schedule
from fivefold.axes.pp.simulate import Costs, simulate
from fivefold.core.layout import Layout
from fivefold.observe.flops import attended_keys
from fivefold.plan.communication import Group, slowed
from fivefold.plan.hardware.link import Link
from fivefold.plan.hardware.parse import cluster
from fivefold.plan.memory.place import Place
from fivefold.plan.models.parse import shape
from fivefold.plan.software import DEEPSEEK_V3, FIVEFOLD, MEGATRON_2021, MEGATRON_2022
from fivefold.plan.time.attention import core
from fivefold.plan.time.block import Neighbours, block
from fivefold.plan.time.data import Held, Ways, gradients, sharded
from fivefold.plan.time.flops import training_flops
from fivefold.plan.time.messages import waited
from fivefold.plan.time.rates import UNALIGNED, Rates, rates
from fivefold.plan.time.work import inner_bytes, kinds, outer_bytes, products, rows
from fivefold.plan.workload import Software, Strategy, Training

UNIT = Rates(matrix=1.0, half=1.0, small=0.0, memory=1.0, attention=1.0, launch=0.0)
LLAMA = shape("llama3.1-8b")


def place(
    layout: str = "", software: Software = FIVEFOLD, model: str = "llama3.1-8b", micro: int = 2
) -> Place:
    parsed = Layout.parse(layout)
    training = Training(4096, micro * parsed.dp, compute="bf16")
    return Place.of(shape(model), training, Strategy(parsed, micro), software)


@pytest.mark.parametrize(
    "name", ["llama3.1-8b", "qwen3-8b", "mixtral-8x7b", "deepseek-v3", "gpt3-175b"]
)
def test_products_are_the_operations_that_are_counted(name: str) -> None:
    model = shape(name)
    here = place(model=name, software=replace(FIVEFOLD, imbalance=1.0))
    config = model.config
    total = 0.0
    for layer in range(config.num_layers):
        for each in products(model, config.is_sparse(layer), 1, 1):
            total += each.flops(rows(here, each))
        keys = attended_keys(here.sequence, config.windows[layer])
        total += 2 * here.inside * config.num_heads * keys * (config.head_dim + config.value_dim)
    total += 2 * here.inside * config.vocab_size * config.hidden_size
    assert 3 * total == pytest.approx(here.inside * training_flops(model, here.sequence), rel=1e-9)


def test_tensor_ranks_divide_products() -> None:
    one, eight = (sum(each.elements for each in products(LLAMA, False, tp, 1)) for tp in (1, 8))
    assert one == 8 * eight


def test_fused_attention_takes_its_operations() -> None:
    here = place("tp=2")
    forward, backward, _ = core(here, UNIT, None)
    assert forward == 4 * 2 * 4096 * 16 * 128 * attended_keys(4096)
    assert backward == 2.5 * forward


def test_scores_in_memory_are_all_of_them() -> None:
    here = place("tp=2", replace(MEGATRON_2021, dropout=False))
    forward, backward, _ = core(here, replace(UNIT, half=float("inf")), None)
    scores = 2 * 4096 * 16 * 4096
    assert forward == 4 * 2 * scores  # written, read and written, read: 2 bytes each
    assert backward == 7 * 2 * scores
    masked = core(place("tp=2", MEGATRON_2021), replace(UNIT, half=float("inf")), None)
    assert masked[0] - forward == 5 * scores


def test_sequence_parallel_ranks_divide_norms() -> None:
    with_it, without = place("tp=8"), place("tp=8,sequence_parallel=false")
    for backward in (False, True):
        assert outer_bytes(without, backward) == 8 * outer_bytes(with_it, backward)
        assert inner_bytes(without, False, backward) == inner_bytes(with_it, False, backward)
    # Two norms read and write, two sums read two and write one: of 2 bytes.
    assert outer_bytes(with_it, False) == 2 * 512 * 4096 * 2 * (2 * 2 + 2 * 3)


def test_a_product_is_bound_by_operations_or_by_memory() -> None:
    speed = Rates(100.0, 100.0, 50.0, 10.0, 1.0, 0.5)
    assert speed.product(1000.0, 1.0) == 0.5 + 10.5
    assert speed.product(1000.0, 500.0) == 0.5 + 50.0
    assert speed.product(1.0, 0.0) == 0.5 + 0.04  # small ones are slowed four times at most
    assert speed.product(1e6, 0.0, aligned=False) == pytest.approx(
        UNALIGNED * speed.product(1e6, 0.0), rel=1e-3
    )


def test_rates_of_formats() -> None:
    h100 = cluster("8xH100").device
    wide, narrow = rates(h100, "bf16"), rates(h100, "fp8")
    assert narrow.matrix == pytest.approx(2 * 0.9 * wide.matrix, rel=1e-3)
    assert narrow.half == wide.half and narrow.attention == wide.attention


def test_a_layer_with_and_without_sequence_parallelism() -> None:
    """22B on 8 A100: 7.7 ms forward and 11.9 backward, 7.2 and 11.8 with it (2205.05198, table 4)."""
    servers = cluster("8xA100-80GB")
    for parallel, forward, backward in ((False, 7.7, 11.9), (True, 7.2, 11.8)):
        layout = Layout(tp=8, sequence_parallel=parallel)
        model = shape("megatron-22b")
        here = Place.of(
            model, Training(2048, 4, compute="fp16"), Strategy(layout, 4), MEGATRON_2022
        )
        found = block(
            here, rates(servers.device, "fp16"), Neighbours.of(servers, layout), None, False
        )
        assert found.forward.seconds * 1e3 == pytest.approx(forward, rel=0.05)
        both = found.input.seconds + found.weight.seconds
        assert both * 1e3 == pytest.approx(backward, rel=0.05)


def test_kinds_of_layers() -> None:
    deepseek = shape("deepseek-v3")
    found = kinds(deepseek, range(0, 5))
    assert found.layers == ((None, False, 3), (None, True, 2)) and found.first and not found.last


WIRE = Link("wire", 1.0, 0.0, efficiency=1.0)
ALONE = Group(1, 1, WIRE, WIRE)


def _ways(shards: int, copies: int = 1) -> Ways:
    return Ways(Group(shards, 1, WIRE, WIRE), Group(copies, 1, WIRE, WIRE), ALONE)


def test_gradients_and_parameters_move_once_a_step() -> None:
    layout, held = Layout(dp_shard=4, dp_replicate=2, zero=1), Held(10**9)
    bare = replace(FIVEFOLD, overlap=0.0)
    found = gradients(_ways(4, 2), layout, bare, held, 0.0, 0.0, 2)
    scattered, summed, gathered = 3 / 4 * 4e9, 2 * 1 / 2 * 1e9, 3 / 4 * 2e9
    assert found.exposed == pytest.approx(scattered + summed + gathered, rel=1e-6)
    beside = gradients(_ways(4, 2), layout, FIVEFOLD, held, 0.0, 1e9, 2)
    assert beside.hidden == 1e9
    assert beside.exposed == pytest.approx(found.exposed - 1e9 + slowed(1e9), rel=1e-6)


def test_zero_3_gathers_twice_and_scatters_once() -> None:
    layout, held = Layout(dp_shard=4, zero=3), Held(10**9)
    bare = replace(FIVEFOLD, overlap=0.0)
    found = sharded(_ways(4), layout, bare, held, 0.0, 0.0, 2)
    assert found.exposed == pytest.approx(3 / 4 * (2 + 2 + 4) * 1e9, rel=1e-6)
    assert sharded(_ways(4), Layout(dp_shard=4, zero=1), bare, held, 0.0, 0.0, 2).exposed == 0


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_messages_add_what_they_add_to_the_simulation(name: str, ranks: int) -> None:
    virtual = 2 if name == "interleaved" else 1
    layout = Layout(pp=ranks, schedule=name, virtual=virtual)
    for m in (2 * ranks, 4 * ranks):
        schedule = build_schedule(name, ranks, m, virtual if virtual > 1 else None)
        silent, spoken = (simulate(schedule, Costs(send=send)).makespan for send in (0.0, 1e-3))
        found = waited(layout, m, 1e-3, blocking=False)
        assert found == pytest.approx(spoken - silent, rel=1e-6)


def test_tokens_go_once_to_a_server_and_beside_computation() -> None:
    servers, layout = cluster("256x8xH800"), Layout(dp_shard=64, ep=64)
    found = {}
    for software in (FIVEFOLD, DEEPSEEK_V3):
        here = place("dp_shard=64,ep=64", software, "deepseek-v3", micro=1)
        speed = rates(servers.device, "bf16")
        found[software.name] = block(
            here, speed, Neighbours.of(servers, layout), None, True
        ).forward
    plain, once = found["fivefold"], found["deepseek-v3"]
    assert once.experts + once.hidden_experts < 0.6 * plain.experts
    assert once.hidden_experts > once.experts

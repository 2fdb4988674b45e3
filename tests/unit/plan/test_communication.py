"""Collectives over links, and which links an axis has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fivefold.core.layout import Layout
from fivefold.plan.communication import Group, expert_groups, group, send, stage_link
from fivefold.plan.hardware.cluster import Cluster
from fivefold.plan.hardware.link import Link
from fivefold.plan.hardware.parse import cluster

NEAR = Link("near", 100e9, 0.0, efficiency=1.0)
FAR = Link("far", 10e9, 0.0, efficiency=1.0)
GB = 1e9


@pytest.fixture(scope="module")
def servers() -> Cluster:
    return cluster("16x8xH100")


def test_a_ring_moves_n_minus_1_of_n_and_an_all_reduce_twice_that() -> None:
    ring = Group(8, 1, NEAR, FAR)
    assert ring.gather(GB) == pytest.approx(7 / 8 / 100, rel=1e-2)
    assert ring.reduce(GB) == pytest.approx(2 * ring.gather(GB), rel=1e-2)
    assert ring.scatter(GB) == ring.gather(GB)


def test_alone_nothing_is_sent() -> None:
    alone = Group(1, 1, NEAR, FAR)
    assert alone.gather(GB) == alone.reduce(GB) == alone.exchange(GB) == 0


def test_more_ranks_in_a_domain_share_what_crosses() -> None:
    one, four = Group(1, 8, NEAR, FAR), Group(4, 8, NEAR, FAR)
    assert one.gather(GB) == pytest.approx(4 * four.gather(GB), rel=0.02)


def test_small_messages_cost_latency() -> None:
    late = replace(NEAR, latency=1e-3, start=1e-2)
    assert Group(8, 1, late, FAR).gather(1.0) == pytest.approx(1e-2 + 7e-3, rel=1e-3)


def test_many_domains_reduce_small_messages_along_a_tree() -> None:
    late = replace(FAR, latency=1e-3)
    assert Group(1, 256, NEAR, late).reduce(8.0) < 0.05 * 2 * 255 * 1e-3


def test_an_exchange_keeps_its_own_part_and_is_bound_by_what_leaves_the_domain() -> None:
    assert Group(4, 1, NEAR, FAR).exchange(GB) == pytest.approx(3 / 4 / 100, rel=1e-6)
    assert Group(4, 2, NEAR, FAR).exchange(GB) == pytest.approx(4 / 8 / 10, rel=1e-6)


def test_tensor_ranks_are_neighbours_and_data_ranks_far(servers: Cluster) -> None:
    layout = Layout(tp=8, dp_shard=16)
    tensor, data = group(servers, layout, ("tp",)), group(servers, layout, ("dp_shard",))
    assert (tensor.inside, tensor.domains, data.inside, data.domains) == (8, 1, 1, 16)
    assert tensor.where == servers.inside.name and data.where == servers.between.name


def test_a_group_of_two_axes_is_both(servers: Cluster) -> None:
    layout = Layout(tp=2, cp=2, dp_shard=32)
    both = group(servers, layout, ("dp_shard", "cp"))
    assert (both.inside, both.domains) == (4, 16)


def test_tensor_parallel_16_crosses_servers_and_not_a_rack(servers: Cluster) -> None:
    layout = Layout(tp=16, dp_shard=8)
    assert group(servers, layout, ("tp",)).crosses
    assert not group(cluster("18x4xGB200"), Layout(tp=16), ("tp",)).crosses


def test_the_order_of_axes_decides(servers: Cluster) -> None:
    layout = Layout(tp=8, dp_shard=16, order=("pp", "dp_replicate", "tp", "cp", "dp_shard"))
    assert group(servers, layout, ("tp",)).crosses
    assert group(servers, layout, ("dp_shard",)).inside == 8


def test_experts_are_among_neighbours(servers: Cluster) -> None:
    exchange, same = expert_groups(servers, Layout(dp_shard=32, ep=8))
    assert (exchange.inside, exchange.domains) == (8, 1)
    assert (same.inside, same.domains) == (1, 4)


def test_stages_are_joined_by_the_slower_link_that_occurs(servers: Cluster) -> None:
    assert stage_link(servers, Layout(pp=8)) == servers.inside
    assert stage_link(servers, Layout(pp=2, tp=8)) == servers.between
    assert send(FAR, GB) == pytest.approx(0.1)

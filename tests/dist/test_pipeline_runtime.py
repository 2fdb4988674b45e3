"""Every schedule gives the loss and the gradients of the unsplit stack, and nothing hangs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fivefold.axes.pp.build import build_schedule
from fivefold.axes.pp.simulate import simulate
from fivefold.axes.pp.split import LayerCosts, split_layers
from fivefold.core.errors import LayoutError
from tests.dist import pipeline_cases as cases
from tests.dist.harness import WorkerError, Workers

GetWorkers = Callable[[int], Workers]
EXACT = 1e-12  # fp64; sums in another order
# ranks, schedule, micro-batches, stages a rank
RUNS: list[tuple[int, str, int, int | None]] = [
    (1, "1f1b", 3, None),
    (1, "zbv", 3, None),
    (2, "gpipe", 5, None),
    (2, "1f1b", 1, None),
    (2, "1f1b", 7, None),
    (2, "interleaved", 6, 2),
    (2, "interleaved", 4, 4),
    (2, "zb-h1", 6, None),
    (2, "zbv", 7, None),
    (2, "zbv", 2, None),
    (2, "dualpipe-v", 6, None),
    (2, "dualpipe", 6, None),
    (4, "gpipe", 6, None),
    (4, "1f1b", 9, None),
    (4, "1f1b", 2, None),
    (4, "interleaved", 8, 2),
    (4, "interleaved", 10, 3),
    (4, "interleaved", 3, 4),
    (4, "zb-h1", 9, None),
    (4, "zbv", 9, None),
    (4, "zbv", 3, None),
    (4, "dualpipe-v", 10, None),
    (4, "dualpipe", 12, None),
    pytest.param(8, "interleaved", 16, 2, marks=pytest.mark.slow),  # type: ignore[list-item]
    pytest.param(8, "zbv", 16, None, marks=pytest.mark.slow),  # type: ignore[list-item]
    pytest.param(8, "dualpipe", 20, None, marks=pytest.mark.slow),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("ranks", "name", "microbatches", "virtual"), RUNS)
def test_every_schedule_gives_the_numbers_of_the_unsplit_stack(
    workers: GetWorkers, ranks: int, name: str, microbatches: int, virtual: int | None
) -> None:
    found = workers(ranks).run(cases.compare, name, microbatches, virtual)
    schedule = build_schedule(name, ranks, microbatches, virtual)
    timeline = simulate(schedule)
    for rank, each in enumerate(found):
        assert each["error"] < EXACT
        assert each["hooks"]
        for (stage, parameter), fired in each["hooks"].items():
            assert fired == len(schedule.microbatches_of(stage)), parameter
        assert each["most_alive"] <= timeline.peak_in_flight(rank)
        assert each["alive"] == 0
        for stage, begun in each["begun"].items():
            split = any(a.kind == "W" and a.stage == stage for a in schedule.orders[rank])
            lasts = [last for _, last in begun]
            assert lasts == [False] * (len(begun) - 1) + [not split]


@pytest.mark.parametrize(
    ("name", "virtual", "borders", "directions"),
    [("1f1b", None, 3, 1), ("interleaved", 2, 7, 1), ("zbv", None, 6, 1), ("dualpipe", None, 6, 2)],
)
def test_bytes_on_the_wire(
    workers: GetWorkers, name: str, virtual: int | None, borders: int, directions: int
) -> None:
    """Hidden states and their gradient over every border between ranks, no more."""
    found = workers(4).run(cases.compare, name, 8, virtual)
    each_way = [cases.bytes_of_hidden(range(d, 8, directions)) for d in range(directions)]
    assert sum(each["sent"] for each in found) == 2 * sum(each_way) * borders / directions


def test_a_runtime_runs_again(workers: GetWorkers) -> None:
    for each in workers(2).run(cases.compare, "zbv", 4, None, 3):
        assert each["error"] < EXACT


@pytest.mark.parametrize("name", ["interleaved", "zb-h1", "zbv", "dualpipe", "dualpipe-v"])
def test_sends_that_end_when_they_are_received_do_not_stop_the_pipeline(
    workers: GetWorkers, name: str
) -> None:
    for each in workers(4).run(cases.compare, name, 8, None, 1, "every_send_a_rendezvous"):
        assert each["error"] < EXACT


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("late_message", "1f1b"),
        ("scaled_at_every_stage", "1f1b"),
        ("scaled_at_every_stage", "zbv"),
        ("weights_delivered_twice", "zb-h1"),
        ("weights_delivered_twice", "dualpipe"),
    ],
)
def test_planted_faults_show(workers: GetWorkers, fault: str, name: str) -> None:
    found = workers(2).run(cases.compare, name, 14, None, 1, fault)  # sizes come again after 12
    assert max(each["error"] for each in found) > 1e-3


def test_a_real_run_is_measured(workers: GetWorkers) -> None:
    schedule = build_schedule("zb-h1", 2, 4)
    for spans in workers(2).run(cases.measured, "zb-h1", 4):
        for rank, order in enumerate(schedule.orders):
            assert [action for holder, action in spans if holder == rank] == [str(a) for a in order]


@pytest.fixture
def pair() -> Iterator[Workers]:
    started = Workers(2)  # of its own: this case ends workers
    yield started
    started.stop()


def test_a_rank_that_dies_ends_the_others(pair: Workers) -> None:
    pair.run(cases.compare, "1f1b", 2)  # so that starting does not count
    started = time.monotonic()
    with pytest.raises(WorkerError) as error:
        pair.run(cases.die_in_the_middle, "1f1b", 6)
    assert time.monotonic() - started < 20
    said = str(error.value)
    assert "rank 1 died" in said
    assert "TrainingError: no " in said
    assert "look for what ended rank 1 of the pipeline first" in said


def test_stages_of_another_rank_are_refused() -> None:
    schedule = build_schedule("zbv", 2, 4)
    layers = split_layers(LayerCosts((1.0,) * cases.LAYERS), 4)
    chunks: dict[int, Any] = {1: cases.StackChunk(layers[1]), 2: cases.StackChunk(layers[2])}
    with pytest.raises(LayoutError, match=r"given stages \[1, 2\]; give it \[0, 3\]"):
        cases.PipelineRuntime(schedule, 0, None, chunks, cases.CPU)

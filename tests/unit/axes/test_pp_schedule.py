"""Pipeline schedules: valid for all numbers, torch's own orders, the papers' bubbles and memory."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from fivefold.axes.pp.action import Action
from fivefold.axes.pp.build import SCHEDULES, build_schedule
from fivefold.axes.pp.check import check
from fivefold.axes.pp.program import Transfer, programs
from fivefold.axes.pp.schedule import Schedule
from fivefold.axes.pp.simulate import Costs, simulate
from fivefold.core.errors import LayoutError


def all_small() -> list[Schedule]:
    """Every schedule that can be built of up to 6 ranks and 15 micro-batches."""
    found = []
    for name in SCHEDULES:
        for ranks in range(1, 7):
            for microbatches in range(1, 16):
                for virtual in (2, 3) if name == "interleaved" else (None,):
                    try:
                        found.append(build_schedule(name, ranks, microbatches, virtual))
                    except LayoutError as error:
                        assert error.mend
    return found


ALL = all_small()  # each has passed `check`


def test_every_schedule_is_valid_for_all_numbers_it_takes() -> None:
    built: dict[str, int] = defaultdict(int)
    for schedule in ALL:
        built[schedule.name] += 1
    for name in ("gpipe", "1f1b", "zb-h1", "zbv"):
        assert built[name] == 6 * 15
    assert built["interleaved"] > 100
    assert built["dualpipe-v"] == sum(16 - 2 * ranks for ranks in range(1, 7))
    assert built["dualpipe"] == 6 + 4 + 2


def torch_orders(schedule: Schedule) -> list[list[str]]:
    """What torch.distributed.pipelining does for the same numbers."""
    kind = {
        "gpipe": "ScheduleGPipe",
        "1f1b": "Schedule1F1B",
        "interleaved": "ScheduleInterleaved1F1B",
        "zb-h1": "ScheduleInterleavedZeroBubble",
        "zbv": "ScheduleZBVZeroBubble",
        "dualpipe-v": "ScheduleDualPipeV",
    }[schedule.name]
    theirs: Any = object.__new__(getattr(torch_schedules, kind))
    theirs._n_microbatches = schedule.microbatches
    theirs.pp_group_size = schedule.ranks
    theirs._num_stages = theirs.num_stages = schedule.stages
    theirs.n_local_stages = schedule.stages // schedule.ranks
    theirs.number_of_rounds = max(1, schedule.microbatches // schedule.ranks)
    theirs.microbatches_per_round = schedule.microbatches // theirs.number_of_rounds
    if schedule.name in ("gpipe", "1f1b"):
        orders = theirs._get_pipeline_order()
    else:
        orders = {r: theirs._calculate_single_rank_operations(r) for r in range(schedule.ranks)}
    return [_flat(orders[rank]) for rank in range(schedule.ranks)]


def _flat(actions: list[Any]) -> list[str]:
    """Their names for our actions; idle and what is done for the data axis left out."""
    found = []
    for action in actions:
        if action is None or action.computation_type.value == "REDUCE_GRAD":
            continue
        for part in action.sub_actions or (action,):
            found.append(str(part))
    return found


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipe-v"])
def test_orders_are_those_of_torch(name: str) -> None:
    compared = 0
    for schedule in ALL:
        if schedule.name != name or (name == "1f1b" and schedule.microbatches < schedule.ranks):
            continue  # for few micro-batches the list of torch's 1F1B has some that do not exist
        ours = [[str(a) for a in order] for order in schedule.orders]
        theirs = torch_orders(schedule)
        if name == "1f1b":  # and on the last rank always: it counts forwards from 1 there
            ours[-1] = [action.strip("0123456789") for action in ours[-1]]
            theirs[-1] = [action.strip("0123456789") for action in theirs[-1]]
        assert ours == theirs, (schedule.ranks, schedule.microbatches)
        compared += 1
    assert compared > 20


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 2), (4, 4), (4, 9), (8, 32)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_of_gpipe_and_1f1b(name: str, ranks: int, microbatches: int) -> None:
    """(p - 1) / (m + p - 1): Huang et al. 2019, section 2.3; Narayanan et al. 2021, section 2.2.1."""
    timeline = simulate(build_schedule(name, ranks, microbatches))
    wanted = (ranks - 1) / (microbatches + ranks - 1)
    assert timeline.bubble_share == pytest.approx(wanted, abs=1e-12)


def test_bubble_of_1f1b_does_not_depend_on_the_times_of_forward_and_backward() -> None:
    schedule = build_schedule("1f1b", 4, 8)
    timeline = simulate(schedule, Costs(forward=1.0, input=1.7, weight=0.6))
    assert timeline.bubble_share == pytest.approx(3 / 11, abs=1e-12)


@pytest.mark.parametrize(
    ("ranks", "rounds", "virtual"), [(2, 1, 2), (4, 2, 2), (4, 4, 3), (8, 2, 4)]
)
def test_bubble_of_interleaved(ranks: int, rounds: int, virtual: int) -> None:
    """(p - 1) / v m of the ideal time: Narayanan et al. 2021, section 2.2.2."""
    schedule = build_schedule("interleaved", ranks, ranks * rounds, virtual)
    timeline = simulate(schedule)
    ideal = timeline.busy(0)
    assert (timeline.makespan - ideal) / ideal == pytest.approx(
        (ranks - 1) / (virtual * ranks * rounds), abs=1e-12
    )


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 12), (8, 24)])
def test_bubble_of_zb_h1_is_a_third(ranks: int, microbatches: int) -> None:
    """(p - 1)(F + I - W) instead of (p - 1)(F + I + W): Qi et al. 2023, table 2."""
    zero = simulate(build_schedule("zb-h1", ranks, microbatches))
    plain = simulate(build_schedule("1f1b", ranks, microbatches))
    idle = [t.makespan - t.busy(0) for t in (zero, plain)]
    assert idle == [pytest.approx(ranks - 1), pytest.approx(3 * (ranks - 1))]


@pytest.mark.parametrize(
    ("ranks", "microbatches"), [(2, 3), (2, 8), (4, 7), (4, 12), (8, 15), (8, 32)]
)
def test_zbv_ranks_do_not_idle_once_they_have_started(ranks: int, microbatches: int) -> None:
    """Zero bubble with F = I = W: Qi et al. 2024, section 6."""
    timeline = simulate(build_schedule("zbv", ranks, microbatches))
    assert [timeline.idle_inside(rank) for rank in range(ranks)] == [0.0] * ranks
    too_few = simulate(build_schedule("zbv", 4, 6))
    assert any(too_few.idle_inside(rank) for rank in range(4))


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (4, 16), (8, 16), (8, 20), (16, 32)])
def test_bubble_and_memory_of_dualpipe(ranks: int, microbatches: int) -> None:
    """At most (p/2 - 1)(F&B + B - 3W) idle and p + 1 kept: DeepSeek-V3, table 2.

    There a forward and a backward side by side end together. One after the other, F&B = F + B, and
    the forward's hidden states leave before the backward: I less, which leaves F + I - W.
    """
    schedule = build_schedule("dualpipe", ranks, microbatches)
    timeline = simulate(schedule)
    assert max(timeline.peak_in_flight(rank) for rank in range(ranks)) == ranks + 1
    for rank in range(ranks):
        assert timeline.makespan - timeline.busy(rank) == pytest.approx(ranks // 2 - 1)
    for forward, input, weight in ((1.0, 1.0, 1.0), (1.0, 1.25, 0.75), (1.0, 1.2, 0.9)):
        timeline = simulate(schedule, Costs(forward, input, weight))
        whole = input + weight
        paper = (ranks // 2 - 1) * (forward + whole + whole - 3 * weight)
        assert max(timeline.makespan - timeline.busy(rank) for rank in range(ranks)) <= paper


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (8, 24)])
def test_bubble_and_memory_of_dualpipe_v(ranks: int, microbatches: int) -> None:
    """As DualPipe of twice the depth, on stages half as long; p + 1/2 kept."""
    timeline = simulate(build_schedule("dualpipe-v", ranks, microbatches))
    for rank in range(ranks):
        assert timeline.makespan - timeline.busy(rank) == pytest.approx(ranks - 1)
    assert max(timeline.peak_share(rank) for rank in range(ranks)) == ranks + 0.5


def test_activations_kept() -> None:
    """GPipe keeps all, 1F1B p - r on rank r, ZB-H1 p on every rank, ZB-V p of half a stage twice."""

    def kept(name: str) -> list[int]:
        timeline = simulate(build_schedule(name, 4, 12))
        return [timeline.peak_in_flight(rank) for rank in range(4)]

    assert kept("gpipe") == [12] * 4
    assert kept("1f1b") == [4, 3, 2, 1]
    assert kept("zb-h1") == [4] * 4
    assert kept("zbv") == [8] * 4
    zbv = simulate(build_schedule("zbv", 4, 12))
    assert zbv.peak_share(0) == 4


def test_messages_take_time_beside_the_computation() -> None:
    schedule = build_schedule("gpipe", 2, 1)
    timeline = simulate(schedule, Costs(send=0.5))
    assert [(s.start, s.end) for s in timeline.spans] == [(0, 1), (1.5, 2.5), (2.5, 4.5), (5, 7)]
    assert [(m.source, m.target, m.start, m.end) for m in timeline.messages] == [
        (0, 1, 1.0, 1.5),
        (1, 0, 4.5, 5.0),
    ]


def test_programs_are_parts_of_one_line_of_events() -> None:
    """Each message is named by both its ranks, in the same order, after what makes it and before
    what needs it; and even if every message is a rendezvous, all ranks come to their ends.
    """
    for schedule in ALL:
        steps = programs(schedule)
        for rank, program in enumerate(steps):
            assert tuple(s for s in program if isinstance(s, Action)) == schedule.orders[rank]
            have = set()
            for step in program:
                if isinstance(step, Transfer):
                    if step.source == rank:
                        assert schedule.made_by(step.action) in have
                    have.add(schedule.made_by(step.action))
                else:
                    assert set(schedule.needed_by(step)) <= have
                    have.add(schedule.made_by(step))
        assert finishes_with_rendezvous(steps), (schedule.name, schedule.ranks)


def finishes_with_rendezvous(steps: tuple[tuple[Any, ...], ...]) -> bool:
    """Whether ranks that stop at each message until its other rank is there come to their ends."""
    place = [0] * len(steps)

    def at(rank: int) -> Any:
        return steps[rank][place[rank]] if place[rank] < len(steps[rank]) else None

    moved = True
    while moved:
        moved = False
        for rank in range(len(steps)):
            step = at(rank)
            if isinstance(step, Action):
                place[rank] += 1
                moved = True
            elif step is not None and at(step.source) == step == at(step.target):
                place[step.source] += 1
                place[step.target] += 1
                moved = True
    return all(at(rank) is None for rank in range(len(steps)))


def edited(schedule: Schedule, rank: int, order: list[Action]) -> Schedule:
    orders = [*schedule.orders[:rank], tuple(order), *schedule.orders[rank + 1 :]]
    return dataclasses.replace(schedule, orders=tuple(orders))


def test_check_finds_what_is_missing_doubled_misplaced_or_stuck() -> None:
    schedule = build_schedule("zb-h1", 2, 2)
    order = list(schedule.orders[1])
    assert [str(a) for a in order] == ["1F0", "1I0", "1F1", "1I1", "1W0", "1W1"]
    for wrong, said in [
        (order[:-1], "rank 1 does F I for micro-batch 1 on stage 1"),
        ([*order, order[0]], "rank 1 does F I W F for micro-batch 0 on stage 1"),
        ([order[1], order[0], *order[2:]], "rank 1 does I F W for micro-batch 0"),
        ([*order[:1], order[4], order[1], *order[2:4], order[5]], "rank 1 does F W I"),
        ([*order, Action("F", 0, 0)], "rank 1 has no forward of micro-batch 0 on stage 0"),
        ([*order, Action("F", 1, 2)], "rank 1 has no forward of micro-batch 2 on stage 1"),
    ]:
        with pytest.raises(LayoutError, match=said):
            check(edited(schedule, 1, wrong))
    stuck = edited(build_schedule("1f1b", 2, 2), 0, [Action(k, 0, i) for i in (0, 1) for k in "FB"])  # type: ignore[arg-type]
    check(stuck)  # slow, but it ends
    stuck = edited(
        build_schedule("gpipe", 2, 2),
        1,
        [Action("F", 1, 1), Action("B", 1, 1), Action("F", 1, 0), Action("B", 1, 0)],
    )
    stuck = edited(
        stuck, 0, [Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1)]
    )
    with pytest.raises(
        LayoutError,
        match="wait for one another: rank 0 at backward of micro-batch 0 on stage 0; "
        "rank 1 at forward of micro-batch 1 on stage 1",
    ):
        check(stuck)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("1f1f", 4, 8), "unknown pipeline schedule '1f1f'; did you mean '1f1b'"),
        (("1f1b", 0, 8), "0 ranks; use 1 or more"),
        (("1f1b", 4, 0), "0 micro-batches; use 1 or more"),
        (("1f1b", 4, 8, 2), "virtual=2 is of the schedule interleaved alone, not of 1f1b"),
        (("interleaved", 4, 8, 1), "1 virtual stage a rank interleaves nothing; use at least 2"),
        (("interleaved", 4, 9), "9 micro-batches do not divide into 2 equal rounds .* 8 or 12"),
        (("dualpipe", 3, 8), "dualpipe needs an even number of ranks, not 3; use pp=4"),
        (("dualpipe", 4, 9), "at least 8 micro-batches, not 9; use 10"),
        (("dualpipe", 4, 6), "at least 8 micro-batches, not 6; use 8"),
        (
            ("dualpipe-v", 4, 7),
            "dualpipe-v on 4 ranks needs at least 8 micro-batches, not 7; use 8",
        ),
    ],
)
def test_errors_name_the_number_and_the_mend(arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        build_schedule(*arguments)
    with pytest.raises(LayoutError, match="a weight pass cannot take the time 0; give it more"):
        Costs.checked(1, 1, 0, 0)
    with pytest.raises(LayoutError, match="a message cannot take the time -1"):
        Costs.checked(1, 1, 1, -1)

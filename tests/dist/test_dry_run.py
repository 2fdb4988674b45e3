"""The dry run of a layout tells what real ranks hold and move, and what formulae say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fivefold.core.layout import parse_assignments
from tests.dist.dry_run_cases import DENSE, LAYERS, MICRO_BATCHES, SEQUENCE, fake, real, values
from tests.dist.harness import Workers

GetWorkers = Callable[[int], Workers]
# Of the peak. The same storages are counted; a few of some bytes live shorter or longer. Seen: 0.8 %.
TOLERANCE = 0.02
HIDDEN, KV_HEADS, ROWS, ELEMENT = 32, 2, 2, 4
# All parameters of the dense model, in one bucket.
EACH_LAYER = (
    (2 + 2 * KV_HEADS / 4) * HIDDEN**2 + 3 * HIDDEN * DENSE["intermediate_size"] + 2 * HIDDEN
)
PARAMETERS = int(LAYERS * EACH_LAYER + HIDDEN * DENSE["vocab_size"] + HIDDEN) * ELEMENT
HIDDEN_STATES = ROWS * SEQUENCE * HIDDEN * ELEMENT  # [B,S,D] of a micro-batch
SLOW = pytest.mark.slow
CASES = [
    ("dense", "dp_shard=4,zero=1", {}),
    pytest.param("dense", "dp_shard=4,zero=2", {}, marks=SLOW),
    ("dense", "dp_shard=4,zero=3", {}),
    pytest.param("dense", "dp_replicate=2,dp_shard=2", {}, marks=SLOW),
    pytest.param("dense", "dp_replicate=4", {}, marks=SLOW),
    ("dense", "tp=4", {}),
    ("dense", "tp=4,sequence_parallel=false", {}),
    pytest.param("dense", "pp=4", {}, marks=SLOW),
    ("dense", "cp=4", {}),
    pytest.param("dense", "cp=4,ulysses=2,cp_kind=gather", {}, marks=SLOW),
    pytest.param("dense", "tp=2,dp_shard=2", {"precision": {"dtype": "bf16"}}, marks=SLOW),
    ("dense", "dp_shard=2,cp=2,zero=1", {"precision": {"dtype": "bf16"}}),
    pytest.param(
        "dense", "pp=2,dp_shard=2,schedule=interleaved,virtual=2",
        {"train": {"recompute": "full"}}, marks=SLOW,
    ),
    ("dense", "pp=2,tp=2,schedule=zb-h1", {}),
    pytest.param("sparse", "dp_shard=4,ep=4", {}, marks=SLOW),
    pytest.param("sparse", "dp_shard=4,ep=2", {"precision": {"dtype": "bf16"}}, marks=SLOW),
    ("sparse", "tp=2,dp_shard=2,ep=4,zero=1", {}),
    ("sparse", "pp=2,dp_shard=2,ep=2", {"train": {"recompute": "full"}}),
]  # fmt: skip


@pytest.mark.parametrize(("model", "layout", "options"), CASES)
def test_a_dry_run_tells_what_ranks_hold_and_move(
    workers: GetWorkers, model: str, layout: str, options: dict[str, Any]
) -> None:
    given = values(model, parse_assignments(layout), **options)
    ranks = [0, 3] if "pp" in layout else [3]
    found = workers(4).run(real, given)
    for rank, dry in zip(ranks, workers(1).run(fake, given, ranks)[0], strict=True):
        # Gloo's threads let go of what was sent some time after it was waited for.
        late = PARAMETERS if "zero=2" in layout else HIDDEN_STATES if "tp" in layout else 0
        assert_same(dry, found[rank], slack=late)


@pytest.mark.parametrize(
    ("fault", "model", "layout"),
    [
        ("freed parameters stay", "dense", "dp_shard=4,zero=3"),
        ("all rows go to one rank", "sparse", "dp_shard=4,ep=4"),
        ("sums are not seen", "dense", "dp_replicate=4"),
    ],
)
def test_a_planted_fault_is_caught(
    workers: GetWorkers, fault: str, model: str, layout: str
) -> None:
    given = values(model, parse_assignments(layout))
    wanted = workers(4).run(real, given)[3]
    (dry,) = workers(1).run(fake, given, [3], fault)[0]
    with pytest.raises(AssertionError):
        assert_same(dry, wanted)


def test_later_steps_move_what_the_first_one_does(workers: GetWorkers) -> None:
    """FSDP sets itself up in the first step, so that its order could be another one then."""
    given = values("dense", parse_assignments("dp_shard=4,zero=3"))
    first, second = (workers(4).run(real, given, steps)[0] for steps in (1, 2))
    assert by_kind(first) == by_kind(second)
    assert first["bytes"]["activations"] == pytest.approx(second["bytes"]["activations"], rel=0.05)


def test_tensor_parallelism_by_the_formula(workers: GetWorkers) -> None:
    """Two gathers in and two scatters out a block and way; embedding and head have one each."""
    moved = traffic(workers, "tp=4")
    each = MICRO_BATCHES * (2 * LAYERS + 1)
    for kind in ("all-gather", "reduce-scatter"):
        assert moved[kind, "tp"] == (2 * each, 2 * each * HIDDEN_STATES)
    # Norms and shared key/value heads; of the loss the largest logit, then two sums a token; all
    # in chunks of 16 tokens.
    chunks = MICRO_BATCHES * ROWS * SEQUENCE // 16
    norms = (2 * LAYERS + 1) * HIDDEN * ELEMENT
    loss = MICRO_BATCHES * ROWS * SEQUENCE * 3 * ELEMENT
    shared = LAYERS * 2 * HIDDEN * HIDDEN // 4 * ELEMENT
    step = 8 + 8 + 16  # loss, norm, targets with the request to stop
    whole = {axis: numbers for (kind, axis), numbers in moved.items() if kind == "all-reduce"}
    assert sum(count for count, _ in whole.values()) == 2 * chunks + 2 + 3
    assert sum(size for _, size in whole.values()) == pytest.approx(
        norms + loss + shared + step, abs=8
    )


def test_tensor_parallelism_without_sequences_by_the_formula(workers: GetWorkers) -> None:
    """One all-reduce out of attention and feed-forward, and one into them on the way back."""
    moved = traffic(workers, "tp=4,sequence_parallel=false")
    assert not [kind for kind, _ in moved if kind != "all-reduce"]
    chunks = MICRO_BATCHES * ROWS * SEQUENCE // 16
    blocks = MICRO_BATCHES * (4 * LAYERS + 2)
    loss = MICRO_BATCHES * ROWS * SEQUENCE * 3 * ELEMENT
    shared = LAYERS * 2 * HIDDEN * HIDDEN // 4 * ELEMENT
    [(count, size)] = moved.values()
    assert count == blocks + 2 * chunks + 1 + 3
    assert size == blocks * HIDDEN_STATES + loss + shared + 8 + 4 + 16


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_the_data_axis_by_the_formula(workers: GetWorkers, zero: int) -> None:
    found = dry(workers, f"dp_shard=4,zero={zero}")
    held, moved = found["bytes"], traffic_of(found)
    share = PARAMETERS // 4
    assert held["parameters"] == (share if zero == 3 else PARAMETERS)
    assert held["gradients"] == (PARAMETERS if zero == 1 else share)
    assert held["masters"] == 0  # fp32: a part of the parameters
    assert held["optimizer"] == 2 * share
    small = (3, 8 + 4 + 16)
    if zero == 1:
        count, size = moved["all-reduce", "dp_shard"]
        assert (count - small[0], size) == (1, pytest.approx(PARAMETERS, abs=32))
        assert moved["all-gather", "dp_shard"] == (1, PARAMETERS)
    if zero == 2:
        assert moved["reduce-scatter", "dp_shard"] == (MICRO_BATCHES, MICRO_BATCHES * PARAMETERS)
        assert moved["all-gather", "dp_shard"] == (1, PARAMETERS)
    if zero == 3:  # blocks are gathered again in backward, what is left of the stage is not
        root = (HIDDEN * DENSE["vocab_size"] + HIDDEN) * ELEMENT
        gathered = MICRO_BATCHES * (2 * PARAMETERS - root)
        assert moved["all-gather", "dp_shard"] == (MICRO_BATCHES * (2 * LAYERS + 1), gathered)
        scattered = MICRO_BATCHES * (LAYERS + 1)
        assert moved["reduce-scatter", "dp_shard"] == (scattered, MICRO_BATCHES * PARAMETERS)


def test_a_pipeline_by_the_formula(workers: GetWorkers) -> None:
    """Hidden states to the next stage and a gradient back, a micro-batch."""
    given = values("dense", parse_assignments("pp=4"))
    accounts = workers(1).run(fake, given, [0, 1, 3])[0]
    for account, neighbours in zip(accounts, (1, 2, 1), strict=True):
        count = MICRO_BATCHES * neighbours
        for kind in ("send", "recv"):
            assert traffic_of(account)[kind, "pp"] == (count, count * HIDDEN_STATES)


def test_a_ring_by_the_formula(workers: GetWorkers) -> None:
    """Keys and values pass 3 times in forward and in backward, and their gradients 3 times."""
    moved = traffic(workers, "cp=4")
    passes = MICRO_BATCHES * LAYERS * 3 * 3
    message = ROWS * SEQUENCE // 4 * 2 * HIDDEN // 2 * ELEMENT  # half as many heads as queries
    assert moved["send", "cp"] == moved["recv", "cp"] == (passes, passes * message)


def test_experts_by_the_formula(workers: GetWorkers) -> None:
    """Counts, rows there and back in forward; rows there and back in backward."""
    found = dry(workers, "dp_shard=4,ep=4", "sparse")
    passes = MICRO_BATCHES * (LAYERS - 1)
    rows = ROWS * SEQUENCE * 2 * HIDDEN * ELEMENT  # two experts a token
    axis = "dp_shard/ep"
    assert traffic_of(found)["all-to-all", axis] == (5 * passes, passes * (4 * rows + 8 * 8))


def dry(workers: GetWorkers, layout: str, model: str = "dense") -> dict[str, Any]:
    account: dict[str, Any] = workers(1).run(fake, values(model, parse_assignments(layout)), [0])[
        0
    ][0]
    return account


def traffic(workers: GetWorkers, layout: str) -> dict[tuple[str, str], tuple[int, int]]:
    return traffic_of(dry(workers, layout))


def traffic_of(account: dict[str, Any]) -> dict[tuple[str, str], tuple[int, int]]:
    """(count, bytes), all groups along an axis together, as those of shared key/value heads."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for (kind, axis, _), (count, size) in by_kind(account).items():
        before = found.get((kind, axis), (0, 0))
        found[kind, axis] = before[0] + count, before[1] + size
    return found


def assert_same(dry: dict[str, Any], wanted: dict[str, Any], slack: int = 0) -> None:
    assert (dry["rank"], dry["coordinates"]) == (wanted["rank"], wanted["coordinates"])
    assert by_kind(dry) == by_kind(wanted)
    for name, held in wanted["bytes"].items():
        if name in ("activations", "peak"):
            least, most = held * (1 - TOLERANCE) - slack, held * (1 + TOLERANCE)
            assert least <= dry["bytes"][name] <= most, name
        else:
            assert dry["bytes"][name] == held, name


def by_kind(account: dict[str, Any]) -> dict[tuple[str, str, int], tuple[int, int]]:
    return {
        (c["kind"], c["axis"], c["ranks"]): (c["count"], c["bytes"]) for c in account["collectives"]
    }

"""Divided rows give the numbers of whole rows: every kind, every mask, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.dist import context_cases
from tests.dist.context_cases import Case
from tests.dist.harness import Workers

GetWorkers = Callable[[int], Workers]
EXACT = 1e-11  # fp64; seen: 4e-15
FP32 = 2e-6  # relative to the largest value; seen: 7e-7
BF16 = 1e-2  # results are rounded to 2^-8; seen: 5e-3

KINDS = {
    2: [(1, "ring"), (1, "gather"), (2, "ring")],
    4: [(1, "ring"), (1, "gather"), (2, "ring"), (2, "gather"), (4, "ring")],
}
PLACES = [(world, *kind) for world, kinds in KINDS.items() for kind in kinds]
CASES = {
    "plain": Case(),
    "odd": Case(length=37),
    "odd_unpadded": Case(length=37, multiple=1),
    "short_unpadded": Case(length=9, multiple=1),
    "window": Case(window=5),
    "wide_window": Case(window=40),
    "packed": Case(documents=((3, 30, 10), (48,))),
    "packed_by_ranks": Case(documents=((24, 24), (12, 12, 12, 12))),
    "packed_odd": Case(length=43, documents=((7, 9, 20), (1, 42)), window=6),
    "softcap": Case(softcap=1.5, window=20),
    "one_key_head": Case(kv_heads=1),
    "all_key_heads": Case(kv_heads=4),
    "three_key_heads": Case(heads=12, kv_heads=6),
    "latent": Case(key_dim=12, value_dim=8, kv_heads=4, documents=((10, 38),)),
    "wide_values": Case(key_dim=6, value_dim=10),
}


def check(workers: GetWorkers, world: int, case: Case, limit: float = EXACT) -> dict[str, float]:
    errors = workers(world).run(context_cases.compare, case)[0]
    assert max(errors.values()) < limit, errors
    return errors


@pytest.mark.parametrize(("world", "ulysses", "kind"), PLACES)
def test_attention_is_that_of_whole_rows(
    workers: GetWorkers, world: int, ulysses: int, kind: str
) -> None:
    for name, case in CASES.items():
        errors = workers(world).run(
            context_cases.compare, replace(case, ulysses=ulysses, kind=kind)
        )[0]
        assert max(errors.values()) < EXACT, (name, errors)


@pytest.mark.parametrize(
    ("ulysses", "kind"), [(1, "ring"), (2, "ring"), (4, "gather"), (8, "ring")]
)
def test_on_eight_ranks(workers: GetWorkers, ulysses: int, kind: str) -> None:
    case = Case(ulysses, kind, heads=8, documents=((3, 30, 10), (48,)), window=20)
    check(workers, 8, case)
    check(workers, 8, replace(case, documents=(), window=None))


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, Case]:
    world = draw(st.sampled_from([2, 4]))
    ulysses, kind = draw(st.sampled_from(KINDS[world]))
    length = draw(st.integers(2 * world, 70))
    packed = draw(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), max_size=3))
    # Lengths that go on past the row are cut; what is left is padding.
    kv_heads = draw(st.sampled_from([1, 2, 3, 4]))
    return world, Case(
        ulysses=ulysses,
        kind=kind,
        length=length,
        documents=tuple(map(tuple, packed)),
        window=draw(st.none() | st.integers(1, 80)),
        softcap=draw(st.none() | st.just(2.0)),
        heads=kv_heads * draw(st.sampled_from([4, 8])),
        kv_heads=kv_heads,
        key_dim=draw(st.integers(1, 9)),
        value_dim=draw(st.integers(1, 9)),
        multiple=draw(st.sampled_from([None, 1, 3])),
        seed=draw(st.integers(0, 99)),
        batch=draw(st.integers(1, 3)),
    )


@settings(
    deadline=None,
    derandomize=True,
    max_examples=80,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(drawn=cases())
def test_any_shape(workers: GetWorkers, drawn: tuple[int, Case]) -> None:
    check(workers, *drawn)


@pytest.mark.parametrize(("world", "ulysses", "kind"), PLACES)
def test_low_precision(workers: GetWorkers, world: int, ulysses: int, kind: str) -> None:
    packed = Case(ulysses, kind, length=96, documents=((60, 36), (96,)), scale=0.35)
    for case in (packed, replace(packed, documents=())):
        check(workers, world, replace(case, dtype="float32"), FP32)
        check(workers, world, replace(case, dtype="bfloat16"), BF16)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("world", "ulysses", "kind"), PLACES)
def test_a_decoder_has_the_same_loss_and_gradients(
    workers: GetWorkers, world: int, ulysses: int, kind: str, packed: bool
) -> None:
    for errors in workers(world).run(context_cases.decoder_step, ulysses, kind, packed):
        assert max(errors.values()) < EXACT, errors


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation(workers: GetWorkers, recompute: str) -> None:
    for ulysses, kind in KINDS[4]:
        found = workers(4).run(context_cases.decoder_step, ulysses, kind, True, recompute)
        assert max(max(errors.values()) for errors in found) < EXACT, (ulysses, kind)


@pytest.mark.slow
@pytest.mark.parametrize(("ulysses", "kind"), KINDS[2])
def test_compiled_blocks(workers: GetWorkers, ulysses: int, kind: str) -> None:
    """Cut around attention."""
    step = (context_cases.decoder_step, ulysses, kind, True, "none", "", True)
    for errors in workers(2).run(*step):
        assert max(errors.values()) < EXACT, errors


FAULTY: list[tuple[str, Case]] = [
    ("keys_off_by_one", Case(window=9)),
    ("documents_forgotten", CASES["packed"]),
    ("documents_of_this_rank_for_all", CASES["packed"]),
    ("gradient_hop_lost", Case()),
    ("results_averaged", Case()),
    ("own_gradients_only", Case(kind="gather")),
    ("copies_without_gradient", Case(ulysses=2, kv_heads=1)),
]


@pytest.mark.parametrize(("fault", "case"), FAULTY)
@pytest.mark.parametrize("world", [2, 4])
def test_a_planted_fault_is_caught(workers: GetWorkers, world: int, fault: str, case: Case) -> None:
    check(workers, world, case)
    with pytest.raises(AssertionError, match="result"):
        check(workers, world, replace(case, fault=fault), 1e-4)


@pytest.mark.parametrize(
    "fault", ["positions_from_zero", "labels_of_the_shard", "documents_forgotten"]
)
def test_a_planted_fault_of_a_decoder_is_caught(workers: GetWorkers, fault: str) -> None:
    errors = workers(2).run(context_cases.decoder_step, 1, "ring", True, "none", fault)[0]
    assert max(errors.values()) > 1e-4


@pytest.mark.parametrize(("world", "ulysses", "kind"), PLACES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_moves_is_what_the_formula_says(
    workers: GetWorkers, world: int, ulysses: int, kind: str, dtype: str
) -> None:
    case = Case(ulysses, kind, dtype=dtype, kv_heads=1, key_dim=12)
    sent = workers(world).run(context_cases.bytes_sent, case)
    assert sent == [formula(case, world)] * world


def formula(case: Case, world: int) -> tuple[int, int]:
    """Of docs/axes/context.md."""
    size: int = {"float32": 4, "bfloat16": 2}[case.dtype]
    ring, ulysses = world // case.ulysses, case.ulysses
    tokens = case.batch * case.length // world
    keys_sent = max(case.kv_heads, ulysses)  # one key head: each rank wants a copy
    dims: Any = case.key_dim + case.value_dim
    exchange = size * tokens * (case.heads + keys_sent) * dims * (ulysses - 1) // ulysses
    message = tokens * keys_sent * dims  # (ulysses x tokens) of (1 / ulysses) of the heads
    forward = exchange + (ring - 1) * message * size
    return forward, exchange + (ring - 1) * message * (size + 4)


def test_groups(workers: GetWorkers) -> None:
    ranks = context_cases.group_ranks
    assert workers(4).run(ranks, [[0, 1, 2, 3]], 2) == [
        [[0, 2], [0, 1]], [[1, 3], [0, 1]], [[0, 2], [2, 3]], [[1, 3], [2, 3]],
    ]  # fmt: skip
    assert workers(4).run(ranks, [[0, 2], [1, 3]], 1) == [
        [[0, 2], None], [[1, 3], None], [[0, 2], None], [[1, 3], None],
    ]  # fmt: skip
    assert workers(4).run(ranks, [[0, 2], [1, 3]], 2) == [
        [None, [0, 2]], [None, [1, 3]], [None, [0, 2]], [None, [1, 3]],
    ]  # fmt: skip

"""Expert parallelism gives what all experts on one rank give, in fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.dist import expert_cases
from tests.dist.harness import Workers

EXACT = 1e-12
Start = Callable[[int], Workers]
worlds = pytest.mark.parametrize("world", [2, 4])


@worlds
@pytest.mark.parametrize("kind", ["any", "crowded", "idle", "dropped"])
def test_outputs_and_gradients_are_those_of_all_experts_at_hand(
    workers: Start, world: int, kind: str
) -> None:
    for found in workers(world).run(expert_cases.errors, kind):
        assert found.keys() == {"output", "hidden", "weight", "gate", "up", "down"}
        assert max(found.values()) <= EXACT, found


@worlds
@pytest.mark.parametrize("recompute", [False, True])
def test_a_decoder_trains_alike(workers: Start, world: int, recompute: bool) -> None:
    for found in workers(world).run(expert_cases.model_errors, recompute):
        assert found.pop("load") == 0
        assert max(found.values()) <= 1e-11, found


@pytest.mark.parametrize("fault", ["no way back", "not regrouped", "not put apart", "averaged"])
def test_a_planted_fault_is_found(workers: Start, fault: str) -> None:
    found = workers(2).run(expert_cases.errors, "any", fault)
    assert max(max(errors.values()) for errors in found) > 1e-3


def test_experts_that_do_not_divide_are_refused(workers: Start) -> None:
    for words in workers(2).run(expert_cases.refuses_experts_that_do_not_divide):
        assert words == "LayoutError: layout ep=2 does not divide the model's 7 experts; use ep=1"


@pytest.mark.parametrize("kind", ["any", "crowded", "idle", "dropped"])
def test_deep_ep_over_a_stand_in_for_its_library(workers: Start, kind: str) -> None:
    for found in workers(2).run(expert_cases.errors, kind, None, True):
        assert max(found.values()) <= EXACT, found


def test_deep_ep_that_is_not_installed_is_named(workers: Start) -> None:
    for words in workers(2).run(expert_cases.refuses_without_the_library):
        assert words.startswith("MissingExtraError: expert dispatch by DeepEP needs the package")
        assert "plain all-to-all" in words


SECTIONS = [
    {"aux_loss": 0.3},
    {"sequence_aux_loss": 0.3, "router_z_loss": 0.1},
    {"capacity_factor": 1.0, "aux_loss": 0.3},
]


@worlds
@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: next(iter(s)))
def test_load_is_that_of_whole_sequences(
    workers: Start, world: int, zigzag: bool, section: dict[str, float]
) -> None:
    for found in workers(world).run(expert_cases.sequence_errors, section, zigzag):
        assert found.pop("dropped") > 0 if "capacity_factor" in section else True
        assert found.pop("load") == 0
        assert max(found["output"], found["router"]) <= 1e-11, found


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: next(iter(s)))
def test_sequences_that_are_taken_for_whole_are_found(
    workers: Start, section: dict[str, float]
) -> None:
    """The planted fault: each rank balances, or cuts off, its own tokens."""
    for found in workers(2).run(expert_cases.sequence_errors, section, True, False):
        assert max(found["output"], found["router"]) > 1e-4, found


def test_what_moves_is_each_row_there_and_back_twice(workers: Start) -> None:
    for counted, formula in workers(4).run(expert_cases.bytes_sent):
        assert counted == formula > 0

"""Dry runs over the package's own operators: either policy, low precision, packed documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from fivefold.core.layout import Layout
from fivefold.core.resolve import build as configuration
from fivefold.engines.train.check import check_run
from fivefold.engines.train.data.batch import Batch
from fivefold.engines.train.dry_run.fake_world import fake_world
from fivefold.engines.train.dry_run.run import build
from fivefold.kernels import dispatch
from fivefold.model.attention_backend import document_starts
from tests.dist.dry_run_cases import fake, low_precision, real, values

TOLERANCE = 0.02  # of the peak, as where ranks are compared


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kernels", ["fast", "deterministic"])
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_dry_run_of_a_policy_holds_what_a_run_does(
    dtype: str, kernels: str, recompute: str
) -> None:
    given = values(
        "dense", {}, train={"kernels": kernels, "recompute": recompute},
        precision={"dtype": dtype},
    )  # fmt: skip
    (dry,) = fake(given, [0])
    with dispatch.deterministic(kernels == "deterministic"):
        wanted = real(given)
    for name, held in wanted["bytes"].items():
        assert dry["bytes"][name] == pytest.approx(held, rel=TOLERANCE), name
    assert not dispatch.is_deterministic()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_experts_by_the_deterministic_policy(dtype: str) -> None:
    """Products of experts are one operator, whose shapes do not depend on counts."""
    given = values("sparse", {}, train={"kernels": "deterministic"}, precision={"dtype": dtype})
    (dry,) = fake(given, [0])
    assert dry["bytes"]["peak"] > dry["bytes"]["parameters"] > 0


def packed(config: Any) -> Batch:
    shape = (config.train.micro_batch, config.data.sequence_length)
    return Batch(*(torch.zeros(shape, dtype=torch.int64) for _ in range(4)))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kernels", ["fast", "deterministic"])
def test_packed_documents_have_starts_without_values(dtype: str, kernels: str) -> None:
    config = configuration(values("dense", {}, precision={"dtype": dtype}))
    shape = check_run(config)
    with (
        fake_world(Layout(), 0) as process,
        dispatch.deterministic(kernels == "deterministic"),
    ):
        built = build(config, shape, process, process.device)
        batch = packed(config)
        assert document_starts(batch.documents).shape == (2,)
        result = built.step([batch], 1e-3)
        masters = built.model.masters()
    assert result.loss == result.grad_norm == 1.0  # what a fake world answers
    assert all(isinstance(part.values, FakeTensor) for part in masters.values())


def test_the_choice_follows_what_the_fake_device_multiplies() -> None:
    """A choice made before for this CPU does not stand for the device of a dry run, nor after it."""
    before = dispatch.choose("linear", "cpu", torch.bfloat16)
    with low_precision():
        assert dispatch.choose("linear", "cpu", torch.bfloat16).implementation == "torch"
    assert dispatch.choose("linear", "cpu", torch.bfloat16) == before

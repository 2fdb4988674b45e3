"""Masters and names of a model on one rank, whatever is wrapped around it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fivefold.axes.apply import apply
from fivefold.axes.dp.protocol import decoder_name
from fivefold.core.config import PrecisionSection
from fivefold.core.errors import LayoutError
from fivefold.core.layout import Layout
from fivefold.model.decoder import Decoder
from fivefold.model.families import parse_config
from fivefold.model.objective import Objective
from tests.unit.axes.test_recompute import CONFIG


def axis_of(layout: str = "", dtype: str = "fp32", **options: Any) -> tuple[Decoder, Any]:
    decoder = Decoder(parse_config(CONFIG))
    decoder.initialize(0)
    precision = PrecisionSection(dtype=dtype)
    chosen = Layout.parse(layout)
    return decoder, apply(
        Objective(decoder), layout=chosen, mesh=None, precision=precision, **options
    )


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("compile", [False, True])
def test_masters_go_by_the_decoders_names(recompute: str, compile: bool) -> None:
    names = [name for name, _ in Decoder(parse_config(CONFIG), device="meta").named_parameters()]
    _, axis = axis_of(recompute=recompute, compile=compile)
    assert list(axis.masters()) == names


def test_wrappers_are_stripped_wherever_they_stand() -> None:
    wrapped = "decoder.layers.0._orig_mod._checkpoint_wrapped_module.attention.query.weight"
    assert decoder_name(wrapped) == "layers.0.attention.query.weight"
    assert decoder_name("decoder.embedding.weight") == "embedding.weight"


def test_fp32_masters_are_the_parameters() -> None:
    decoder, axis = axis_of()
    for name, parameter in decoder.named_parameters():
        assert axis.masters()[name].values.data_ptr() == parameter.data_ptr()
    assert not dist.is_initialized()


def test_low_precision_follows_its_fp32_masters() -> None:
    decoder, axis = axis_of(dtype="bf16")
    parameter, master = decoder.norm.weight, axis.masters()["norm.weight"].values
    assert (parameter.dtype, master.dtype) == (torch.bfloat16, torch.float32)
    master += 2**-10  # lost in bf16, kept in the master
    axis.publish()
    assert float(parameter[0]) == 1.0
    assert float(master[0]) == 1.0 + 2**-10
    master += 1.0
    axis.publish()
    assert float(parameter[0]) == 2.0


def test_offloaded_masters_are_copies() -> None:
    decoder, axis = axis_of("offload=optimizer")
    master = axis.masters()["norm.weight"].values
    assert master.data_ptr() != decoder.norm.weight.data_ptr()
    master.fill_(3.0)
    axis.publish()
    assert float(decoder.norm.weight[0]) == 3.0


def test_more_ranks_than_rows_are_refused_before_anything_is_wrapped() -> None:
    with pytest.raises(LayoutError, match="dp_shard=97 leaves ranks without parameters"):
        axis_of("dp_shard=97")

"""The part of a decoder that one rank computes: its heads, columns and experts of its layers."""

from __future__ import annotations

# N tokens, D hidden, W rows whose logits are wanted, V vocabulary, T tensor ranks
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.axes.ep.divide import divide_experts
from fivefold.axes.ep.same_tokens import SameTokensDispatch
from fivefold.axes.mesh import EXPERT, Mesh
from fivefold.axes.part import Slice
from fivefold.axes.pp.split import estimate_costs, split_layers
from fivefold.axes.tp.divide import TensorAxis, divide
from fivefold.model.attention_backend import AttentionBackend
from fivefold.model.config import ModelConfig
from fivefold.model.decoder import Decoder
from fivefold.model.projection import Projection

ASSUMED_CONTEXT = 1024
"""Tokens that attention looks back on, for the cost of a layer beside that of the head."""


@dataclass(frozen=True)
class Part:
    """A stage of the decoder with what is cut out of its weights, and the ranks around it.

    before, after: those that hold the stages before and after this one, with the same heads.
    speakers: of the last stage, one rank for each part of the vocabulary, in its order.
    """

    decoder: Decoder
    slices: Mapping[str, Slice]
    rank: int
    before: int | None
    after: int | None
    speakers: tuple[int, ...]
    cache_config: ModelConfig
    """The sizes of this rank's cache: its layers, its key/value heads."""

    @property
    def first_layer(self) -> int:
        """Number in the whole model."""
        return self.decoder.here.start

    def states(
        self, tokens: Tensor, positions: Tensor, attention: AttentionBackend, dtype: torch.dtype
    ) -> Tensor | None:
        """int64 tokens and positions [1,N] through all stages: [1,N,D] on ranks of the last one.

        Every rank calls it. `dtype` is that of hidden states.
        """
        if self.before is None:
            hidden = self.decoder.embed(tokens)
        else:
            size = (*tokens.shape, self.decoder.config.hidden_size)
            hidden = torch.empty(size, dtype=dtype, device=tokens.device)
            dist.recv(hidden, self.before)
        hidden = self.decoder.run(hidden, positions, attention)
        if self.after is not None:
            dist.send(hidden.contiguous(), self.after)
            return None
        return self.decoder.norm(hidden)

    def pack(self) -> None:
        """As `Decoder.pack`; see there."""
        if self.after is None:
            self.decoder.pack()
            return
        for module in self.decoder.modules():
            if isinstance(module, Projection):
                module.pack()


def cut_part(config: ModelConfig, mesh: Mesh, dtype: torch.dtype) -> Part:
    """This rank's part on the meta device."""
    layout = mesh.layout
    decoder = Decoder(config, device="meta", dtype=dtype)
    slices = {name: Slice.of(parameter) for name, parameter in decoder.named_parameters()}
    group = mesh.group(("tp",))
    if group is not None:
        # A step has as many tokens as it has: sequences are not divided between blocks.
        axis = TensorAxis(group, *mesh.place(("tp",)), sequence_parallel=False)
        slices = divide(decoder, axis).slices
    if (experts := mesh.group(EXPERT)) is not None:
        slices |= divide_experts(decoder, experts, SameTokensDispatch)
    costs = estimate_costs(decoder, min(ASSUMED_CONTEXT, config.max_positions))
    place = mesh.coordinates(mesh.rank)
    layers = split_layers(costs, layout.pp, layout.stage_layers)[place["pp"]]
    stage = decoder.stage(layers)
    stage.requires_grad_(False)
    slices |= {name: Slice.of(buffer) for name, buffer in stage.named_buffers()}
    line = mesh.dense[:, place["dp_replicate"], place["dp_shard"], place["cp"], place["tp"]]
    stages: list[int] = line.tolist()
    at = place["pp"]
    return Part(
        decoder=stage,
        slices={name: slices[name] for name in stage.state_dict()},
        rank=mesh.rank,
        before=stages[at - 1] if at else None,
        after=stages[at + 1] if at + 1 < layout.pp else None,
        speakers=tuple(mesh.dense[-1, 0, 0, 0].tolist()),
        cache_config=replace(
            config,
            num_layers=len(layers),
            num_kv_heads=max(1, config.num_kv_heads // layout.tp),
        ),
    )

"""A small stack run through a pipeline, beside the same stack run whole, as cases for workers."""

from __future__ import annotations

import json
import os
import signal
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.axes.pp.build import build_schedule
from fivefold.axes.pp.draw import draw
from fivefold.axes.pp.measured import measured_timeline
from fivefold.axes.pp.program import Transfer
from fivefold.axes.pp.record import from_numbers, to_numbers
from fivefold.axes.pp.runtime import PipelineRuntime
from fivefold.axes.pp.schedule import Schedule
from fivefold.axes.pp.split import LayerCosts, split_layers
from fivefold.axes.pp.weight_gradients import WeightGradients
from fivefold.axes.pp.wire import Arrival, Wire
from fivefold.model.projection import Projection

LAYERS, HIDDEN, VOCABULARY = 16, 6, 11
SCALE = 1 / 7
CPU = torch.device("cpu")


class Layer(nn.Module):
    """Norm, projection with bias, residual."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(100 + layer)
        self.norm = nn.Parameter(torch.rand(HIDDEN, dtype=torch.float64, generator=generator))
        self.projection = Projection(HIDDEN, HIDDEN, dtype=torch.float64)
        for parameter in self.projection.parameters():
            parameter.data.normal_(generator=generator)

    def forward(self, hidden: Tensor) -> Tensor:
        normal = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)
        return hidden + torch.tanh(self.projection(normal * self.norm))


class Part(nn.Module):
    """Some layers, before them the embedding, after them head and loss, if they are at an end."""

    def __init__(self, layers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(i) for i in layers)
        table = torch.randn(
            VOCABULARY, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(5)
        )
        self.embedding = nn.Parameter(table.clone()) if layers.start == 0 else None
        self.head = nn.Parameter(table.flip(0).clone()) if layers.stop == LAYERS else None

    def forward(self, hidden: Tensor | None, tokens: Tensor) -> Tensor:
        if hidden is None:
            assert self.embedding is not None
            hidden = self.embedding[tokens[:, :-1]]
        for layer in self.layers:
            hidden = layer(hidden)
        if self.head is None:
            return hidden
        return nn.functional.cross_entropy(
            (hidden @ self.head.T).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
        )


def tokens_of(index: int) -> Tensor:
    """Micro-batches of different numbers and lengths of sequences."""
    generator = torch.Generator().manual_seed(1000 + index)
    return torch.randint(0, VOCABULARY, (1 + index % 3, 4 + index % 4), generator=generator)


class CameIn:
    """How many of the hidden states that came in are still in memory."""

    def __init__(self) -> None:
        self.most = 0
        self._seen: list[weakref.ref[Tensor]] = []

    def note(self, hidden: Tensor) -> None:
        self._seen.append(weakref.ref(hidden))
        self.most = max(self.most, self.now())

    def now(self) -> int:
        return sum(seen() is not None for seen in self._seen)


class StackChunk:
    """A stage over a Part; notes when backwards begin and which hidden states came in."""

    def __init__(self, layers: range) -> None:
        self.module = Part(layers)
        self.begun: list[tuple[int, bool]] = []
        self.came_in = CameIn()
        self.die_at: int | None = None

    def forward(self, hidden: Tensor | None, index: int) -> Tensor:
        output = self.module(hidden, tokens_of(index))
        if hidden is not None:
            self.came_in.note(hidden)
        return output

    def hidden(self, index: int) -> tuple[torch.Size, torch.dtype]:
        tokens = tokens_of(index)
        return torch.Size((tokens.shape[0], tokens.shape[1] - 1, HIDDEN)), torch.float64

    def begin_backward(self, index: int, last: bool) -> None:
        if index == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.begun.append((index, last))


def whole(microbatches: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the unsplit stack."""
    stack = Part(range(LAYERS))
    loss = torch.zeros((), dtype=torch.float64)
    for index in range(microbatches):
        one = stack(None, tokens_of(index))
        (one * SCALE).backward()
        loss += one.detach()
    return loss, gradients_of(stack, 0)


def gradients_of(part: Part, first: int) -> dict[str, Tensor]:
    """By the names of the unsplit stack."""
    found = {}
    for name, parameter in part.named_parameters():
        if name.startswith("layers."):
            number, rest = name.removeprefix("layers.").split(".", 1)
            name = f"layers.{int(number) + first}.{rest}"
        assert parameter.grad is not None, name
        found[name] = parameter.grad
    return found


def build(schedule: Schedule, **options: Any) -> tuple[PipelineRuntime, dict[int, StackChunk]]:
    split = split_layers(LayerCosts((1.0,) * LAYERS), schedule.stages)
    rank = dist.get_rank() if schedule.ranks > 1 else 0
    chunks = {s: StackChunk(split[schedule.part(s)]) for s in schedule.held(rank)}
    group = dist.group.WORLD if schedule.ranks > 1 else None
    return PipelineRuntime(schedule, rank, group, chunks, CPU, **options), chunks


def compare(
    name: str, microbatches: int, virtual: int | None = None, steps: int = 1, fault: str = ""
) -> dict[str, Any]:
    """The worst relative difference from the unsplit stack, and what else tests look at."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    schedule = build_schedule(name, world, microbatches, virtual)
    with FAULTS[fault]():
        runtime, chunks = build(schedule)
        came_in = CameIn()  # of all stages of this rank
        for chunk in chunks.values():
            chunk.came_in = came_in
        hooks, sent = count_hooks(chunks), count_bytes(runtime)
        for _ in range(steps):
            loss = runtime.run(SCALE)
        sent_by_step = sum(sent) / steps
        held_out = runtime.evaluate()
        parts = {s: gradients_of(c.module, first_layer(schedule, s)) for s, c in chunks.items()}
    parts = sum_directions(schedule, parts)
    for total in (loss, held_out):
        if world > 1:
            dist.all_reduce(total)
    wanted_loss, wanted = whole(microbatches)
    errors = [relative(loss, wanted_loss), relative(held_out, wanted_loss)]
    for found in parts.values():
        errors += [relative(found[n], wanted[n] * steps) for n in found]
    return {
        "error": max(errors),
        "hooks": hooks,
        "sent": sent_by_step,
        "begun": {stage: chunk.begun for stage, chunk in chunks.items()},
        "most_alive": came_in.most,
        "alive": came_in.now(),
    }


def sum_directions(
    schedule: Schedule, parts: dict[int, dict[str, Tensor]]
) -> dict[int, dict[str, Tensor]]:
    """A stage's gradients and those of the stage that computes the same part the other way."""
    if schedule.directions == 1:
        return parts
    gathered: list[dict[int, dict[str, Tensor]]] = [{} for _ in range(schedule.ranks)]
    dist.all_gather_object(gathered, parts)
    everywhere = {stage: found for each in gathered for stage, found in each.items()}
    count = len(schedule.placement)
    return {
        stage: {n: g + everywhere[(stage + schedule.stages) % count][n] for n, g in found.items()}
        for stage, found in parts.items()
    }


def first_layer(schedule: Schedule, stage: int) -> int:
    return split_layers(LayerCosts((1.0,) * LAYERS), schedule.stages)[schedule.part(stage)].start


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


def count_hooks(chunks: dict[int, StackChunk]) -> dict[tuple[int, str], int]:
    counts: dict[tuple[int, str], int] = {}

    def counted(key: tuple[int, str]) -> Any:
        def hook(_: Tensor) -> None:
            counts[key] = counts.get(key, 0) + 1

        return hook

    for stage, chunk in chunks.items():
        for name, parameter in chunk.module.named_parameters():
            parameter.register_post_accumulate_grad_hook(counted((stage, name)))
    return counts


def count_bytes(runtime: PipelineRuntime) -> list[int]:
    """The bytes of every message that this rank sends, as they are sent."""
    sent: list[int] = []
    real = runtime._wire.send

    def send(tensor: Tensor, transfer: Transfer) -> None:
        sent.append(tensor.nbytes)
        real(tensor, transfer)

    runtime._wire.send = send  # type: ignore[method-assign]
    return sent


def bytes_of_hidden(microbatches: range) -> int:
    """fp64 hidden states of all of `microbatches`."""
    tokens = [tokens_of(index)[:, :-1] for index in microbatches]
    return sum(each.numel() * HIDDEN * 8 for each in tokens)


def measured(name: str, microbatches: int) -> list[tuple[int, str]]:
    """The actions of a real run by their starts, and that their times are in order."""
    schedule = build_schedule(name, dist.get_world_size(), microbatches)
    runtime, _ = build(schedule, record=True)
    runtime.run(SCALE)
    timeline = measured_timeline(runtime, dist.group.WORLD)
    done: dict[Any, float] = {}
    for span in timeline.spans:
        for value in schedule.needed_by(span.action):
            assert done[value] <= span.start + 1e-6, span
        done[schedule.made_by(span.action)] = span.end
    assert 0 < timeline.bubble_share < 1
    again = from_numbers(json.loads(json.dumps(to_numbers(timeline))))
    assert again == timeline and draw(again, 80) == draw(timeline, 80)
    return [(span.rank, str(span.action)) for span in timeline.spans]


def die_in_the_middle(name: str, microbatches: int) -> None:
    """The last rank is killed when its backward of micro-batch 1 begins."""
    schedule = build_schedule(name, dist.get_world_size(), microbatches)
    runtime, chunks = build(schedule)
    if dist.get_rank() == dist.get_world_size() - 1:
        for chunk in chunks.values():
            chunk.die_at = 1
    runtime.run(SCALE)


def every_send_a_rendezvous() -> AbstractContextManager[Any]:
    """No fault: a message's sender waits until it is received, as NCCL may make it."""
    real = Wire.send

    def send(self: Wire, *arguments: Any) -> None:
        real(self, *arguments)
        self.finish()

    return mock.patch.object(Wire, "send", send)


def late_message() -> AbstractContextManager[Any]:
    """The hidden states or gradient of the micro-batch before, where it has the same size."""
    real = Arrival.take
    kept: dict[torch.Size, Tensor] = {}

    def take(self: Arrival) -> Tensor:
        tensor = real(self)
        before = kept.get(tensor.shape, tensor)
        kept[tensor.shape] = tensor
        return before

    return mock.patch.object(Arrival, "take", take)


def scaled_at_every_stage() -> AbstractContextManager[Any]:
    """The factor on the loss applied again to the gradient that comes in."""
    real = PipelineRuntime._taken

    def taken(self: PipelineRuntime, value: Any) -> Tensor:
        return real(self, value) * (self._scale if value[0] == "gradient" else 1)

    return mock.patch.object(PipelineRuntime, "_taken", taken)


def weights_delivered_twice() -> AbstractContextManager[Any]:
    """What was put aside stays there and is delivered again."""
    real = WeightGradients.deliver

    def deliver(self: WeightGradients, microbatch: int) -> None:
        aside = self._aside[microbatch]
        real(self, microbatch)
        self._aside[microbatch] = aside
        real(self, microbatch)

    return mock.patch.object(WeightGradients, "deliver", deliver)


FAULTS: dict[str, Any] = {
    "": nullcontext,
    "every_send_a_rendezvous": every_send_a_rendezvous,
    "late_message": late_message,
    "scaled_at_every_stage": scaled_at_every_stage,
    "weights_delivered_twice": weights_delivered_twice,
}

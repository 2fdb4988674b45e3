"""One rank of an engine: its part of the model, its cache, and what it does when told."""

from __future__ import annotations

# N tokens, D hidden, W rows whose logits are wanted, V vocabulary, T tensor ranks
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.axes.mesh import build_mesh
from fivefold.core.layout import Layout
from fivefold.engines.serve.paged.attention import PagedAttention
from fivefold.engines.serve.paged.cache import PagedCache
from fivefold.engines.serve.paged.memory import check_weights_fit, memory_left, reset_peak
from fivefold.engines.serve.paged.runner import PagedRunner
from fivefold.engines.serve.paged.weights import ServedWeights
from fivefold.engines.serve.parallel.messages import Loaded, Measured, Profile, Step, TakeCache
from fivefold.engines.serve.parallel.part import Part, cut_part
from fivefold.kernels import dispatch
from fivefold.model.attention_backend import CausalAttention
from fivefold.observe.memory import memory_bytes
from fivefold.weights.load_parts import load_parts
from fivefold.weights.source import ModelSource


class Rank:
    """Made on every rank at the same time; so are `step`, `head` and `states` called."""

    def __init__(
        self,
        source: ModelSource,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
        memory_share: float,
    ) -> None:
        mesh = build_mesh(layout, device.type)
        self.part: Part = cut_part(source.config, mesh, dtype)
        self.dtype, self.device = dtype, device
        self._check_memory(memory_share)
        load_parts(self.part.decoder, self.part.slices, source, dtype, device)
        if dispatch.is_deterministic():
            self.part.pack()  # or every product would
        self.cache: PagedCache | None = None
        self._rows: Tensor | None = None

    def loaded(self) -> Loaded:
        """What rank 0 needs to know of this part."""
        config = self.part.cache_config
        per_token = config.num_layers * config.num_kv_heads * (config.head_dim + config.value_dim)
        elements = sum(p.numel() for p in self.part.decoder.parameters())
        return Loaded(self.part.slices, elements, per_token)

    def take_cache(self, order: TakeCache) -> None:
        """Memory for keys and values of the engine's sequences."""
        self.cache = self.new_cache(order.blocks, order.block_size, order.dtype)
        self.weights = ServedWeights(PagedRunner(self.part.decoder, self.cache))

    def new_cache(
        self, blocks: int, block_size: int, dtype: torch.dtype | None = None
    ) -> PagedCache:
        """For this rank's layers and heads; `dtype` None: the model's."""
        config = self.part.cache_config
        return PagedCache(config, blocks, block_size, dtype or self.dtype, self.device)

    @torch.inference_mode()
    def step(self, step: Step) -> Tensor | None:
        """All of a step; gives what `head` gives, if it is part of it."""
        assert self.cache is not None, "a step needs a cache"
        return self._step(step, self.cache)

    def _step(self, step: Step, cache: PagedCache) -> Tensor | None:
        cache.copy_blocks(step.copies)
        batch = step.tensors(self.device)
        attention = PagedAttention(batch, cache, self.part.first_layer)
        states = self.part.states(batch.tokens[None], batch.positions[None], attention, self.dtype)
        self._rows = None if states is None else states[0].index_select(0, batch.rows)
        return self.head() if step.head and step.rows else None

    @torch.inference_mode()
    def head(self, places: Sequence[int] | None = None) -> Tensor | None:
        """Logits [W,V/T] of the step's wanted rows, or of those at `places` among them.

        They go to rank 0, which alone is given its own part, if it has one.
        """
        if self.part.rank not in self.part.speakers or self._rows is None:
            return None
        rows = self._rows if places is None else self._rows[list(places)]
        logits = self.part.decoder.logits(rows)
        if self.part.rank:
            dist.send(logits.contiguous(), 0)
            return None
        return logits

    @torch.inference_mode()
    def states(self, tokens: Sequence[int]) -> Tensor | None:
        """Hidden states [N,D] of one sequence by itself, given to rank 0."""
        ids = torch.tensor([list(tokens)], device=self.device)
        places = torch.arange(len(tokens), device=self.device)[None]
        found = self.part.states(ids, places, CausalAttention(), self.dtype)
        if self.part.rank == self.part.speakers[0] and self.part.rank:
            assert found is not None, "who speaks is of the last stage"
            dist.send(found[0].contiguous(), 0)
        return None if found is None else found[0]

    @torch.inference_mode()
    def profile(self, order: Profile) -> tuple[Measured, Tensor | None]:
        """Run a step once and measure its peak; gives what `step` does, too."""
        before = reset_peak(self.device)
        cache = self.new_cache(order.blocks, order.block_size)
        found = self._step(order.step, cache)
        if found is not None:
            found.log_softmax(dim=-1).argmax(dim=-1)  # as reported log-probabilities do
        taken = max(0, memory_bytes(self.device.type) - before)
        del cache
        self._rows = None
        return Measured(taken, *memory_left(self.device)), found

    def repack(self) -> None:
        """Bring what is packed beside the weights up to date with them."""
        if dispatch.is_deterministic() and self.weights.sleeping != 2:
            self.part.pack()

    def _check_memory(self, share: float) -> None:
        """Raise MemoryBudgetError on all ranks, before weights are loaded, if they do not fit.

        Ranks on a host share its memory.
        """
        held = self.part.decoder.state_dict().values()
        own = sum(tensor.numel() * tensor.element_size() for tensor in held)
        if self.device.type == "cpu":
            all_ranks = torch.tensor(own)
            dist.all_reduce(all_ranks)
            own = int(all_ranks)
        check_weights_fit(own, self.device, share)

"""An engine's model on several ranks, as the engine on rank 0 sees it."""

from __future__ import annotations

# N tokens, D hidden, W rows whose logits are wanted, V vocabulary, T tensor ranks
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.axes.tp.plan import Split, share
from fivefold.core.errors import FivefoldError
from fivefold.core.layout import Layout
from fivefold.engines.serve.paged.batch import PagedBatch
from fivefold.engines.serve.paged.memory import worst_plan
from fivefold.engines.serve.paged.runner import HEAD_ROWS
from fivefold.engines.serve.paged.settings import EngineSettings
from fivefold.engines.serve.paged.weights import shapes_of
from fivefold.engines.serve.parallel.errors import RankError
from fivefold.engines.serve.parallel.group import join_group, open_store
from fivefold.engines.serve.parallel.memory import blocks_over_ranks
from fivefold.engines.serve.parallel.messages import (
    Done,
    Head,
    Hello,
    Loaded,
    Measured,
    Profile,
    Start,
    States,
    Step,
    TakeCache,
)
from fivefold.engines.serve.parallel.processes import MEND, RankProcesses
from fivefold.engines.serve.parallel.rank import Rank
from fivefold.engines.serve.parallel.weights import RankWeights
from fivefold.engines.serve.scheduling.plan import StepPlan
from fivefold.kernels import dispatch
from fivefold.model.decoder import Decoder
from fivefold.weights.load_parts import check_source
from fivefold.weights.source import ModelSource


class Ranks:
    """Starts the other ranks, loads the parts, and takes memory for the cache.

    It serves as a model does (see `paged.served.Served`), and as its own runner. One error ends
    it: ranks that stopped in the middle of a step are at different places. Raises WeightsError,
    MemoryBudgetError, RankError.
    """

    why_modules: str | None = "a rank holds a part of the decoder, between whose modules it speaks"

    def __init__(
        self,
        source: ModelSource,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
        settings: EngineSettings,
    ) -> None:
        whole = Decoder(source.config, device="meta", dtype=dtype)
        check_source(source, whole)
        self.config, self.dtype, self.device = source.config, dtype, device
        self.ended: FivefoldError | None = None
        self._logits: Tensor | None = None
        ranks, threads = layout.world_size, threads_of(layout)
        store = open_store(ranks)
        self._threads_before = torch.get_num_threads()
        self._processes = processes = RankProcesses(ranks - 1)
        try:
            torch.set_num_threads(threads)
            for rank in range(1, ranks):
                start = Start(
                    str(source.path), layout, dtype, place_of(device, rank),
                    dispatch.is_deterministic(), threads, settings.memory_share, rank, store.port,
                )  # fmt: skip
                processes.send(rank, start)
            processes.receive_all(Hello)  # one that cannot even start is not waited for
            join_group(device, 0, ranks, store.port, store)
            self._rank = Rank(source, layout, dtype, device, settings.memory_share)
            loaded = [self._rank.loaded(), *processes.receive_all(Loaded)]
            self._take_cache(settings, loaded)
        except Exception as error:
            self._end(error)
            assert self.ended is not None
            raise self.ended from error
        except BaseException as error:
            self._end(error)
            raise
        self.decoder = self._rank.part.decoder
        self.parameters = sum(p.numel() for p in whole.parameters())
        slices = [part.slices for part in loaded]
        self.weights = RankWeights(self.together, self._rank, shapes_of(whole), slices)

    @property
    def runner(self) -> Ranks:
        """See Served."""
        return self

    @property
    def watched(self) -> Sequence[Connection]:
        """Ranks say nothing unasked but their last words."""
        return [] if self.ended else self._processes.connections

    def notice(self) -> None:
        """Set `ended` if a rank has gone."""
        if self.ended is None and wait(self._processes.connections, timeout=0):
            self._end(EOFError("a rank has ended"))

    def close(self) -> None:
        """End the other ranks."""
        if self.ended is None:
            self.ended = RankError("the engine is closed", "make a new one")
            self._leave()

    @contextmanager
    def together(self) -> Iterator[RankProcesses]:
        """Around what all ranks do: any error in it is the end. Raises RankError."""
        if self.ended is not None:
            raise self.ended
        try:
            yield self._processes
        except BaseException as error:
            self._end(error)
            if not isinstance(error, Exception):
                raise
            assert self.ended is not None
            raise self.ended from error

    @torch.inference_mode()
    def hidden(self, plan: StepPlan, whole: Collection[int] = ()) -> Tensor:
        """Compute the step; gives the wanted rows' numbers [W] in place of their states."""
        cache = self._rank.cache
        assert cache is not None, "it was taken when the ranks started"
        step = Step.of(PagedBatch.of(plan, cache, whole), tuple(plan.copies), head=not whole)
        with self.together() as others:
            others.send_all(step)
            own = self._rank.step(step)
            self._logits = self._gather(own, step.rows) if step.head else None
        return torch.arange(step.rows)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Numbers of rows [W] to [W,V] fp32: the last step brought them, or ranks are asked."""
        if self._logits is not None:
            found, self._logits = self._logits, None
            assert len(hidden) == len(found), "a step without whole prompts brings what is asked"
            return found
        places = hidden.tolist()
        with self.together() as others:
            if places:
                others.send_all(Head(places))
            own = self._rank.head(places) if places else None
            return self._gather(own, len(places))

    def logits_in_pieces(self, hidden: Tensor) -> Iterator[Tensor]:
        """The same by `HEAD_ROWS` rows."""
        for piece in hidden.split(HEAD_ROWS):
            yield self.logits(piece)

    @torch.inference_mode()
    def states(self, prompt: Sequence[int]) -> Tensor:
        """See Served."""
        with self.together() as others:
            others.send_all(States(list(prompt)))
            own = self._rank.states(prompt)
            if own is not None:
                return own
            size = len(prompt), self.config.hidden_size
            return self._receive(size, self.dtype, self._rank.part.speakers[0])

    def _gather(self, own: Tensor | None, rows: int) -> Tensor:
        """[rows,V] from the parts of the vocabulary; one that is here is `own`."""
        vocabulary, speakers = self.config.vocab_size, self._rank.part.speakers
        wide = torch.promote_types(self.dtype, torch.float32)
        if not rows:
            return torch.empty(0, vocabulary, dtype=wide, device=self.device)
        parts = []
        for place, speaker in enumerate(speakers):
            _, size = share(vocabulary, Split(0), self.config, place, len(speakers))
            if speaker == 0:
                assert own is not None, "rank 0 speaks for itself"
                parts.append(own)
            else:
                parts.append(self._receive((rows, size), wide, speaker))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _receive(self, size: tuple[int, ...], dtype: torch.dtype, rank: int) -> Tensor:
        found = torch.empty(size, dtype=dtype, device=self.device)
        dist.recv(found, rank)
        return found

    def _take_cache(self, settings: EngineSettings, loaded: Sequence[Loaded]) -> None:
        size, dtype = settings.block_size, settings.kv_dtype or self.dtype
        each = [part.cache_elements * size * dtype.itemsize for part in loaded]
        others = self._processes

        def measure() -> list[Measured]:
            plan, blocks = worst_plan(settings.token_budget, settings.max_sequences, size)
            step = Step.of(PagedBatch.of(plan, self._rank.new_cache(blocks, size)), (), head=True)
            order = Profile(step, blocks, size)
            others.send_all(order)
            own = self._rank.profile(order)
            self._gather(own[1], step.rows)
            return [own[0], *others.receive_all(Measured)]

        context = settings.max_context or self.config.max_positions
        self.blocks = blocks_over_ranks(settings, context, self.device, each, measure)
        order = TakeCache(self.blocks, size, dtype)
        others.send_all(order)
        self._rank.take_cache(order)
        others.receive_all(Done)

    def _end(self, error: BaseException) -> None:
        if self.ended is not None:
            return
        if not isinstance(error, Exception):
            self.ended = RankError("the engine was interrupted in the middle of a step", MEND)
        elif isinstance(error, FivefoldError) and not isinstance(error, RankError):
            self.ended = error
        else:
            self.ended = self._processes.cause(error)
        self._leave()

    def _leave(self) -> None:
        self._processes.stop()
        torch.set_num_threads(self._threads_before)
        if dist.is_initialized():
            dist.destroy_process_group()


def place_of(device: torch.device, rank: int) -> str:
    """The device of a rank: of GPUs the next ones after rank 0's."""
    return str(device) if device.type == "cpu" else f"{device.type}:{(device.index or 0) + rank}"


def threads_of(layout: Layout) -> int:
    """Of each rank on a CPU, this one too. Ranks of one stage work at the same time, stages in turn."""
    return max(1, torch.get_num_threads() * layout.pp // layout.world_size)

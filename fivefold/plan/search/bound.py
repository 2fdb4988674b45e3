"""What a strategy costs at least, known before all of its choices are made.

Time: a pass of the whole model on the ranks that share a sequence is judged once, without pipeline
and data ranks. Cut into p stages, the slowest takes no less than a p-th of it, m micro-batches take m
of those, and a schedule adds its bubble of equal stages. What data ranks wait for, messages between
stages, the optimizer and uneven stages come on top: they are left out.

Memory: state at what its ZeRO stage divides, evenly over stages, and what the layers of the first
rank keep of the micro-batches that are under way there.
"""

from __future__ import annotations

from functools import lru_cache

from fivefold.plan.search.job import Estimators, Job, Pass
from fivefold.plan.search.space import MOST_STAGES, Pipe, Split, Width
from fivefold.plan.workload import Recompute, Strategy


class Bounds:
    """Of one job; remembers what was judged."""

    def __init__(self, job: Job, estimators: Estimators) -> None:
        self.job = job
        self.estimators = estimators
        self._passes: dict[tuple[Width, int, Recompute], Pass] = {}
        self._kept: dict[tuple[Width, Recompute], tuple[float, float]] = {}
        self._weights = _Weights.of(job)
        config = job.shape.config
        self._dense = sum(not config.is_sparse(i) for i in range(config.num_layers))

    def a_pass(self, width: Width, micro_batch: int, recompute: Recompute) -> Pass:
        """One micro-batch forward and backward through the whole model."""
        key = width, micro_batch, recompute
        if key not in self._passes:
            job = self.job
            self._passes[key] = self.estimators.one_pass(
                job.shape, job.training, self._alone(*key), job.cluster, job.software
            )
        return self._passes[key]

    def kept(self, width: Width, recompute: Recompute) -> tuple[float, float]:
        """Bytes of one sequence in a dense layer, and in one with experts; more are so many times it."""
        key = width, recompute
        if key not in self._kept:
            job, alone = self.job, self._alone(width, 1, recompute)
            dense, sparse = self._dense, job.shape.config.num_layers - self._dense
            self._kept[key] = tuple(  # type: ignore[assignment]
                self.estimators.kept(job.shape, job.training, alone, job.software, kind)
                if layers
                else float("inf")
                for kind, layers in ((False, dense), (True, sparse))
            )
        return self._kept[key]

    def _alone(self, width: Width, micro_batch: int, recompute: Recompute) -> Strategy:
        layout = width.layout(max(1, width.ep // width.ranks))
        return Strategy(layout, micro_batch, recompute)

    def seconds(
        self, width: Width, pp: int, micro_batch: int, recompute: Recompute, pipe: Pipe | None
    ) -> float:
        """Of a step at least; without `pipe`, of any schedule."""
        job = self.job
        microbatches = job.training.global_batch * width.ranks * pp // (job.devices * micro_batch)
        one = self.a_pass(width, micro_batch, recompute)
        return one.total / pp * microbatches + _idle(one, pp, pipe)

    def bytes(
        self,
        width: Width,
        pp: int,
        micro_batch: int,
        recompute: Recompute,
        pipe: Pipe | None = None,
        split: Split | None = None,
    ) -> float:
        """Of the fullest rank at least."""
        copies = 2 if pipe is not None and pipe.schedule == "dualpipe" else 1
        state = copies * self._state(width, pp, split)
        return state + self._activations(width, pp, micro_batch, recompute, pipe)

    def _state(self, width: Width, pp: int, split: Split | None) -> float:
        job, held = self.job, self._weights
        dp = job.devices // (width.ranks * pp)
        shards = (dp if split is None else split.dp_shard) * width.cp
        zero = 3 if split is None else split.zero
        dense, experts = held.dense / width.tp / pp, held.experts / width.ep / pp
        expert_shards = max(1.0, shards * width.tp / width.ep)
        whole, divided = held.bytes(zero)
        return whole * (dense + experts) + divided * (dense / shards + experts / expert_shards)

    def _activations(
        self, width: Width, pp: int, micro_batch: int, recompute: Recompute, pipe: Pipe | None
    ) -> float:
        """Of the first ranks, which have as many micro-batches under way as there are stages."""
        job = self.job
        dp = job.devices // (width.ranks * pp)
        microbatches = job.training.global_batch // (dp * micro_batch)
        layers = job.shape.config.num_layers
        virtual = None if pipe is None else pipe.virtual
        first, second = under_way(layers, pp, microbatches, virtual)
        dense, sparse = (micro_batch * each for each in self.kept(width, recompute))
        kept = first * min(dense, sparse)
        if (
            0 < self._dense <= layers // pp and pp > 1
        ):  # dense layers come first: the next rank has none
            kept = max(kept, second * sparse)
        return self.estimators.base + self.estimators.fragments * kept


@lru_cache(maxsize=65536)
def under_way(layers: int, pp: int, microbatches: int, virtual: int | None) -> tuple[float, float]:
    """Layers times micro-batches that the first pipeline rank keeps at least, and the second.

    virtual: stages of a rank; None: as many as keep least. Interleaving keeps a (pp-1)/virtual part
    of a micro-batch more, of stages the smallest of which has layers/(pp virtual), rounded down.
    """
    found = []
    for stages in range(1, MOST_STAGES + 1) if virtual is None else (virtual,):
        held, most = layers // (pp * stages) * stages, float(pp)
        if stages > 1 and microbatches > 2 * pp:
            most += (pp - 1) / stages
        if held:
            found.append((held * min(most, microbatches), held * min(most - 1, microbatches)))
    first, second = zip(*found, strict=True)
    return min(first), min(second)


def _idle(one: Pass, pp: int, pipe: Pipe | None) -> float:
    """The bubble of equal stages (docs/axes/pipeline.md)."""
    if pipe is None or pp == 1:
        return 0.0
    parts = pp * pipe.stages()
    if pipe.schedule in ("1f1b", "interleaved"):
        return (pp - 1) * one.total / parts
    if pipe.schedule == "zbv":
        return (pp - 1) * one.forward / parts
    return (pp / 2 - 1 if pipe.schedule == "dualpipe" else pp - 1) * one.early / parts


class _Weights:
    """Elements that layers hold, and what a ZeRO stage does to an element's bytes."""

    def __init__(self, job: Job, dense: float, experts: float) -> None:
        self.job, self.dense, self.experts = job, dense, experts

    @classmethod
    def of(cls, job: Job) -> _Weights:
        config = job.shape.config
        hidden, layers = config.hidden_size, config.num_layers
        matrices = 3 if job.shape.gated else 2
        sparse = sum(config.is_sparse(i) for i in range(layers))
        dense = matrices * hidden * config.intermediate_size * (layers - sparse)
        dense += config.vocab_size * hidden
        experts = 0.0
        if config.moe is not None:
            experts = 3.0 * hidden * config.moe.expert_size * config.moe.experts * sparse
            dense += 3 * hidden * config.moe.shared_size * sparse
        if config.mla is None:
            wide = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
            dense += wide * hidden * layers
        return cls(job, float(dense), experts)

    def bytes(self, zero: int) -> tuple[float, float]:
        """(of what every rank has, of what is divided), for an element."""
        software, training = self.job.software, self.job.training
        moments = 8.0 if training.optimizer == "adamw" else 4.0
        wide = training.compute == "fp32" or software.parameter_bytes >= 4
        if zero == 3:
            more = software.parameter_bytes if software.flat_shards and not wide else 0
            gradient = software.gradient_bytes if software.flat_shards else 4.0
            return 0.0, 4.0 + more + gradient + moments
        parameter = 4.0 if wide else float(software.parameter_bytes)
        masters, gradient = (0.0 if wide else 4.0), (4.0 if wide else software.gradient_bytes)
        if zero == 2:
            return parameter, gradient + masters + moments
        return parameter + gradient, masters + moments

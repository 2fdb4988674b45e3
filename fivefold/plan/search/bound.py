"""What a strategy costs at least, known before all of its choices are made.

Time: a pass of the whole model on the ranks that share a sequence is judged once, without pipeline
and data ranks. Cut into p stages, the slowest takes no less than a p-th of it, m micro-batches take m
of those, and a schedule that starts a stage after another adds at least its bubble of equal stages.
What data ranks wait for, the optimizer and uneven stages come on top: they are left out.

Memory: state at what its ZeRO stage divides, layers evenly over stages, and of activations those that
no mode of recomputation does without.
"""

from __future__ import annotations

from dataclasses import replace

from fivefold.plan.search.job import Estimators, Job
from fivefold.plan.search.space import Pipe, Split, Width
from fivefold.plan.workload import Recompute, Strategy

WAITED_IN_LAYERS = ("tp", "cp", "ep")


class Bounds:
    """Of one job; remembers what was judged."""

    def __init__(self, job: Job, estimators: Estimators) -> None:
        self.job = job
        self.estimators = estimators
        self.judged = 0
        self._passes: dict[tuple[Width, int, Recompute], float] = {}
        self._weights = _Weights.of(job)

    def a_pass(self, width: Width, micro_batch: int, recompute: Recompute) -> float:
        """Seconds of one micro-batch forward and backward through the whole model."""
        key = width, micro_batch, recompute
        if key not in self._passes:
            self._passes[key] = self._judge(*key)
        return self._passes[key]

    def _judge(self, width: Width, micro_batch: int, recompute: Recompute) -> float:
        self.judged += 1
        layout = width.layout(max(1, width.ep // width.ranks))
        batch = micro_batch * layout.dp
        training = replace(self.job.training, global_batch=batch)
        strategy = Strategy(layout, micro_batch, recompute)
        job = self.job
        time = self.estimators.step_time(
            job.shape, training, strategy, job.cluster, job.software
        )  # fmt: skip
        waited = sum(time.exposed.get(axis, 0.0) for axis in WAITED_IN_LAYERS)
        return time.compute + time.recompute + waited

    def seconds(
        self, width: Width, pp: int, micro_batch: int, recompute: Recompute, pipe: Pipe | None
    ) -> float:
        """Of a step at least; without `pipe`, of any schedule."""
        job = self.job
        microbatches = job.training.global_batch * width.ranks * pp // (job.devices * micro_batch)
        stage = self.a_pass(width, micro_batch, recompute) / pp
        waiting = 0.0
        if pipe is not None and pipe.schedule in ("1f1b", "interleaved"):
            waiting = (pp - 1) / pipe.stages()
        return stage * (microbatches + waiting)

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
        return state + self._activations(width, pp, micro_batch, recompute)

    def _state(self, width: Width, pp: int, split: Split | None) -> float:
        job, held = self.job, self._weights
        dp = job.devices // (width.ranks * pp)
        shards = (dp if split is None else split.dp_shard) * width.cp
        zero = 3 if split is None else split.zero
        dense, experts = held.dense / width.tp / pp, held.experts / width.ep / pp
        expert_shards = max(1.0, shards * width.tp / width.ep)
        whole, divided = held.bytes(zero)
        return whole * (dense + experts) + divided * (dense / shards + experts / expert_shards)

    def _activations(self, width: Width, pp: int, micro_batch: int, recompute: Recompute) -> float:
        """Of rank 0, which has as many micro-batches under way as there are stages, or all."""
        job = self.job
        config, moe = job.shape.config, job.shape.config.moe
        dp = job.devices // (width.ranks * pp)
        under_way = min(pp, job.training.global_batch // (dp * micro_batch))
        between = micro_batch * job.training.sequence / width.ranks
        element = 4 if job.training.compute == "fp32" else 2
        kept = float(config.hidden_size)  # what a block is given
        if recompute != "full":
            inner = config.intermediate_size
            if moe is not None:
                inner = min(inner, moe.top_k * moe.expert_size + moe.shared_size)
            heads = 0 if config.mla else 2 * config.num_heads + 2 * config.num_kv_heads
            kept += (2 if job.shape.gated else 1) * inner + 0.5 * heads * config.head_dim
        # The last layers may be fewer than others where the head counts as some.
        layers = max(1.0, config.num_layers / pp - 1) if pp > 1 else config.num_layers
        return element * between * kept * layers * under_way


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

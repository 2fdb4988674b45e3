"""Seconds of one step of an engine: a roofline for each kind of work, added up.

A step has `rows` answers that get one token each and chunks of prompts. For each of a rank's
matrices of N x M elements that n tokens meet

    t = max(2 n N M / (peak products), N M bytes / (bandwidth share)) + launch

where `products` falls with the size of the product (`Efficiency`). Of X experts, n tokens that
choose k each touch X (1 - (1 - k/X)^n); these are read, and multiplied in tiles of rows that are
computed whole. Attention of an answer reads its keys and values once; that of a prompt is bound
by operations. What is elementwise moves `PASSES` times the hidden state through memory. A layer
has two all-reduces over tp, or with attention DP the experts' dispatch and combine. All that adds
up: kernels of one stream run one after another. Steps of answers are replayed from captured graphs;
one that reads prompts is launched kernel by kernel, and takes at least what that takes the host.

A pipeline passes pp groups of rows around: a step of all rows takes what a pass of one group
takes, sent from stage to stage.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from functools import lru_cache

from fivefold.plan.hardware.cluster import Cluster
from fivefold.plan.hardware.device import Device
from fivefold.plan.serving import rates
from fivefold.plan.serving.batch import Batch, StepCost, prompt_batch, repeated
from fivefold.plan.serving.collectives import all_reduce, all_to_all, send
from fivefold.plan.serving.formats import bytes_of, is_quantized, product_form
from fivefold.plan.serving.strategy import ServingStrategy
from fivefold.plan.serving.work import Experts, Matrix, Work, work
from fivefold.plan.shape import ModelShape

PASSES = 14
"""Times that a layer reads or writes the hidden state between products: two norms with their
residuals (8), rotary embedding and cache (3), activation (3)."""
LATENT_PASSES = 6
"""What latent attention adds: norms and copies of latents, queries and values."""
ATTENTION_KERNELS = 6
"""Of a layer: norm, two products, rotary embedding and write to the cache, attention, its sum."""
LATENT_KERNELS = 7
FEED_FORWARD_KERNELS = 4
"""Norm, two products, activation."""
EXPERT_KERNELS = 9
"""Norm, router, choice, sorting, two grouped products, activation, sum; scales of the choice."""
SHARED_KERNELS = 3
QUANTIZE_KERNELS = 1
"""Before each product of 8 or 4 bits."""
TILE = 64
"""Rows that a grouped product computes at least for each expert that it touches."""


class StepModel:
    """Times steps of one engine. Building it is slow (a millisecond), asking it is fast."""

    def __init__(self, shape: ModelShape, strategy: ServingStrategy, cluster: Cluster) -> None:
        self.shape, self.strategy, self.cluster = shape, strategy, cluster
        self.work: Work = work(shape, strategy)
        self._device: Device = cluster.device
        layout = strategy.layout
        self._tp, self._stages, self._ways = layout.tp, layout.pp, layout.dp_shard
        kernels = self._kernels()
        self._captured = kernels * rates.launch(self._device)
        self._groups = self._stages * self._ways
        self._others: dict[int, float] = {}
        self._host = kernels * rates.eager(self._device)
        form = product_form(self._device, "fp32" if strategy.weights == "fp32" else "bf16")
        self._attention_rate = rates.attention(self._device, form)
        self._elementwise_rate = rates.elementwise(self._device)
        self._reading = rates.reading(self._device)
        self._forms = {
            matrix.name: product_form(self._device, matrix.form)
            for matrix in (*self.work.matrices, self.work.head)
        }

    def cost(self, batch: Batch) -> StepCost:
        """Seconds of a step by kind, as its slowest rank takes them.

        With speculation a step verifies drafts: what answers take is divided by the tokens that
        they get of it, so that it counts for one token each.
        """
        found = self.strategy.speculation
        if found is None or not batch.rows:
            return self._cost(batch, 1)
        verify = Batch(batch.rows, batch.context, sampled=batch.rows)
        alone = self._cost(verify, found.drafted + 1)
        factor = (1 + found.drafted * found.cost) / found.tokens
        whole = self._cost(batch, found.drafted + 1) if batch.prompt else alone
        return StepCost(
            *(
                getattr(alone, each.name) * factor + getattr(whole, each.name)
                - getattr(alone, each.name)
                for each in fields(alone)
            )
        )  # fmt: skip

    def _cost(self, batch: Batch, each: int) -> StepCost:
        groups = self._groups  # each has its share of the sequences
        rows = batch.rows * each / groups
        tokens = max(1.0, rows + batch.prompt / groups)
        sampled = (batch.sampled + batch.rows * (each - 1)) / groups
        stages = self._stages
        cost = StepCost(
            products=stages * sum(self._product(m, tokens) for m in self.work.matrices),
            experts=stages * self._experts(tokens * self._ways),
            attention=stages * self._attention(batch, each, groups),
            elementwise=stages * self._elementwise(tokens),
            communication=stages * self._communication(tokens) + self._between_stages(tokens),
            launches=stages * self._captured,
            head=self._product(self.work.head, max(1.0, sampled)) if sampled else 0.0,
            host=self.strategy.system.host,
        )
        return self._uncaptured(cost) if batch.prompt else cost

    def _uncaptured(self, cost: StepCost) -> StepCost:
        """The device waits for the host where launching kernels takes longer than they do."""
        working = cost.total - cost.host - cost.launches
        waiting = self._stages * self._host - working
        return cost if waiting < cost.launches else replace(cost, launches=waiting)

    def seconds(self, batch: Batch) -> float:
        """Seconds of a step.

        Of steps without prompts all but attention depends on the number of rows alone: it is kept.
        """
        if batch.prompt or batch.sampled != batch.rows or self.strategy.speculation is not None:
            return self.cost(batch).total
        other = self._others.get(batch.rows)
        if other is None:
            alone = Batch(rows=batch.rows, sampled=batch.rows)
            other = self._others[batch.rows] = self.cost(alone).total
        return other + self._stages * self._attention(batch, 1, self._groups)

    def _product(self, matrix: Matrix, tokens: float) -> float:
        operations = 2 * tokens * matrix.elements
        moved = matrix.bytes + tokens * (matrix.inputs + matrix.outputs) * 2
        seconds = rates.product(self._device, self._forms[matrix.name], operations, moved, tokens)
        return seconds * matrix.layers

    def _experts(self, tokens: float) -> float:
        found = self.work.experts
        if found is None:
            return 0.0
        touched = touched_experts(found, tokens)
        here = found.count / found.ep  # experts of which a rank has a part
        cut = found.ways / found.ep
        load = imbalance(found, tokens)
        mine = min(here, touched / found.ep * math.sqrt(load))
        rows = tokens * found.top_k / found.ep * load
        computed = max(rows, mine * min(TILE, max(1.0, rows / max(mine, 1.0)) * 2))
        elements = found.elements / cut
        form = product_form(self._device, found.form)
        moved = mine * elements * bytes_of(found.form) + rows * self.work.hidden * 2 * 3
        seconds = rates.product(
            self._device, form, 2 * computed * elements, moved, rows / max(mine, 1.0), experts=True
        )
        return seconds * found.layers

    def _attention(self, batch: Batch, each: int, groups: int) -> float:
        found = self.work.attention
        seconds = 0.0
        for window, layers in found.windows:
            context, pairs, read = batch.context, batch.pairs, batch.read
            if window is not None:
                context = min(context, window * batch.rows)
                pairs = min(pairs, window * batch.prompt)
                read = min(read, window * batch.prompt)
            moved = (context + read) * found.token_bytes / self._reading
            scores = context * each * found.latent_pair / self._attention_rate
            prompts = pairs * found.pair / self._attention_rate
            seconds += layers * (max(moved, scores) + prompts) / groups
        return seconds

    def _elementwise(self, tokens: float) -> float:
        passes = PASSES + LATENT_PASSES * self.work.latent
        return self.work.layers * passes * tokens * self.work.hidden * 2 / self._elementwise_rate

    def _communication(self, tokens: float) -> float:
        size = tokens * self.work.hidden * 2
        reduced = all_reduce(self.cluster, self._tp, 1, size)
        found = self.work.experts
        if self._ways == 1 or found is None:
            return 2 * self.work.layers * reduced
        # attention DP: a token's hidden state goes to its experts' ranks and their sums come back
        spread = min(found.top_k, found.ep)
        ranks = found.ways
        dispatch = all_to_all(self.cluster, ranks, 1, size * spread / self._tp)
        both = dispatch * (1 + bytes_of("bf16") / 2)
        return self.work.layers * (reduced + both)

    def _between_stages(self, tokens: float) -> float:
        if self._stages == 1:
            return 0.0
        size = tokens * self.work.hidden * 2 / self._tp
        return self._stages * send(self.cluster, self._tp * self._ways, size)

    def _kernels(self) -> float:
        """Kernels of a pass through one stage, each of which costs a launch at least."""
        found = self.work
        sparse = found.layers - found.dense_layers
        quantize = QUANTIZE_KERNELS * is_quantized(self.strategy.weights)
        attention = ATTENTION_KERNELS + 2 * quantize
        if found.latent:
            attention += LATENT_KERNELS + quantize
        dense = FEED_FORWARD_KERNELS + 2 * quantize
        expert = EXPERT_KERNELS + 2 * is_quantized(self.strategy.expert_format)
        if any(matrix.name == "shared up" for matrix in found.matrices):
            expert += SHARED_KERNELS + 2 * quantize
        count = found.layers * attention + found.dense_layers * dense + sparse * expert
        return count * self.strategy.system.kernels


def touched_experts(experts: Experts, tokens: float) -> float:
    """How many different experts `tokens` choose, when each is as likely as any other."""
    return experts.count * (1 - (1 - experts.top_k / experts.count) ** tokens)


def imbalance(experts: Experts, tokens: float) -> float:
    """Work of the busiest of `ep` ranks over the mean: the expected maximum of random loads."""
    if experts.ep == 1:
        return 1.0
    mean = tokens * experts.top_k / experts.ep
    return min(experts.ep, 1 + math.sqrt(2 * math.log(experts.ep) / mean))


@lru_cache(maxsize=1024)
def step_model(shape: ModelShape, strategy: ServingStrategy, cluster_key: _Key) -> StepModel:
    """The same model for equal arguments."""
    return StepModel(shape, strategy, cluster_key.cluster)


class _Key:
    """A cluster, whose tables cannot be hashed, by identity."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def __hash__(self) -> int:
        return id(self.cluster)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and other.cluster is self.cluster


def model(shape: ModelShape, strategy: ServingStrategy, cluster: Cluster) -> StepModel:
    """Times steps of an engine; kept for the next call."""
    return step_model(shape, strategy, _Key(cluster))


def decode_step(
    shape: ModelShape, strategy: ServingStrategy, cluster: Cluster, batch: int, context: float
) -> float:
    """Seconds of a step in which `batch` answers, of `context` tokens so far, get one token."""
    step = Batch(rows=batch, context=batch * context, sampled=batch)
    return model(shape, strategy, cluster).seconds(step)


def prefill(
    shape: ModelShape,
    strategy: ServingStrategy,
    cluster: Cluster,
    tokens: int,
    *,
    cached: int = 0,
    prompts: int = 1,
) -> float:
    """Seconds to read `prompts` of `tokens` tokens, of which `cached` are found in the cache.

    In chunks of the strategy's token budget.
    """
    found = model(shape, strategy, cluster)
    left, start, seconds = tokens - cached, cached, 0.0
    per_step = max(1, strategy.budget // max(1, left))
    steps = -(-prompts // per_step)
    while left > 0:
        count = min(left, strategy.budget)
        chunk = prompt_batch(start, count, last=count == left)
        seconds += found.seconds(repeated(chunk, prompts / steps))
        start, left = start + count, left - count
    return seconds * steps

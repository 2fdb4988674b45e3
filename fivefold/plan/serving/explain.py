"""The arithmetic behind a plan, line by line."""

from __future__ import annotations

from dataclasses import fields

from fivefold.plan.hardware.cluster import Cluster
from fivefold.plan.serving.batch import Batch, StepCost
from fivefold.plan.serving.capacity import room
from fivefold.plan.serving.formats import bytes_of
from fivefold.plan.serving.step import model, prefill, touched_experts
from fivefold.plan.serving.strategy import ServingStrategy
from fivefold.plan.shape import ModelShape

GIB = 2**30
KINDS = {
    "products": "matrix products",
    "experts": "routed experts",
    "attention": "attention",
    "elementwise": "norms, activations",
    "communication": "between devices",
    "launches": "launches of kernels",
    "head": "logits",
    "host": "the host",
}


def explain(
    shape: ModelShape, strategy: ServingStrategy, cluster: Cluster,
    batch: int, input_tokens: int, output_tokens: int,
) -> list[str]:  # fmt: skip
    """Of a step with `batch` answers, of a prompt, and of the cache."""
    return [
        *cache_lines(shape, strategy, cluster, input_tokens + output_tokens),
        *step_lines(shape, strategy, cluster, batch, input_tokens + output_tokens / 2),
        *_prompt_lines(shape, strategy, cluster, input_tokens),
        *_speculation_lines(strategy),
    ]


def cache_lines(
    shape: ModelShape, strategy: ServingStrategy, cluster: Cluster, context: int
) -> list[str]:
    """How many sequences fit, with the arithmetic of one token's keys and values."""
    config, found = shape.config, room(shape, strategy, cluster)
    per = bytes_of(strategy.kv)
    if config.mla is None:
        heads = max(1.0, config.num_kv_heads / strategy.layout.tp)
        how = f"2 x {heads:g} kv heads x {config.head_dim} dims x {per:g} bytes"
    else:
        how = f"({config.mla.key_value_rank} latent + {config.mla.rope_dim} rotary) x {per:g} bytes"
    layers = -(-config.num_layers // strategy.layout.pp)
    return [
        f"a token's keys and values on a device: {how} x {layers} layers ="
        f" {found.token / 1024:.1f} KiB",
        f"room for them: {strategy.memory_share:.0%} of {found.memory / GIB:.1f} GiB"
        f" - {found.weights / GIB:.1f} weights - {found.step / GIB:.1f} for a step"
        f" - {found.reserve / GIB:.1f} in reserve = {found.cache / GIB:.1f} GiB"
        f" = {found.tokens:,} tokens an engine",
        f"so {found.sequences(context):.1f} requests of {context:,} tokens at once",
    ]


def step_lines(
    shape: ModelShape, strategy: ServingStrategy, cluster: Cluster, batch: int, context: float
) -> list[str]:
    """A step without prompts, by kind of work."""
    found = model(shape, strategy, cluster)
    step = Batch(rows=batch, context=batch * context, sampled=batch)
    cost, work, device = found.cost(step), found.work, cluster.device
    rate = device.bandwidth * device.efficiency.bandwidth
    lines = [
        f"weights on a device: {work.weight_bytes / GIB:.2f} GiB; at {rate / 1e12:.2f} TB/s"
        f" ({device.efficiency.bandwidth:.0%} of {device.bandwidth / 1e12:.2f})"
        f" reading all takes {work.weight_bytes / rate * 1e3:.2f} ms",
    ]
    if work.experts is not None:
        met = touched_experts(work.experts, batch)
        lines.append(
            f"{batch} tokens that choose {work.experts.top_k} of {work.experts.count} experts"
            f" meet {met:.0f} of them: {met / work.experts.count:.0%} of their weights are read"
        )
    lines.append(
        f"keys and values of {batch} x {context:,.0f} tokens:"
        f" {batch * context * work.token_bytes / strategy.layout.dp_shard / GIB:.2f} GiB a device"
    )
    return [*lines, f"a step of {batch} answers: {_parts(cost)}"]


def _prompt_lines(
    shape: ModelShape, strategy: ServingStrategy, cluster: Cluster, tokens: int
) -> list[str]:
    found = model(shape, strategy, cluster)
    count = min(tokens, strategy.budget)
    step = Batch(prompt=count, pairs=count * (count + 1) / 2, sampled=1)
    seconds = prefill(shape, strategy, cluster, tokens)
    chunks = -(-tokens // strategy.budget)
    return [
        f"a prompt of {tokens:,} tokens in {chunks} step{'s' * (chunks > 1)}:"
        f" {seconds * 1e3:.1f} ms; its first {count:,} tokens: {_parts(found.cost(step))}"
    ]


def _speculation_lines(strategy: ServingStrategy) -> list[str]:
    found = strategy.speculation
    if found is None:
        return []
    a, g = found.acceptance, found.drafted
    return [
        f"{g} drafted tokens accepted with {a:g}: (1 - {a:g}^{g + 1}) / (1 - {a:g}) ="
        f" {found.tokens:.2f} tokens a step; at {found.cost:g} of a step for each draft"
        f" / ({g} x {found.cost:g} + 1) = {found.gain:.2f} times as fast where weights bound it"
    ]


def _parts(cost: StepCost) -> str:
    parts = sorted(
        ((getattr(cost, each.name), each.name) for each in fields(cost)), reverse=True
    )  # fmt: skip
    told = [f"{KINDS[name]} {seconds * 1e3:.2f}" for seconds, name in parts if seconds > 0]
    return f"{cost.total * 1e3:.2f} ms ({', '.join(told)})"

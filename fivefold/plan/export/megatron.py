"""Flags of Megatron-LM (megatron/training/arguments.py, core 0.12 and later)."""

from __future__ import annotations

import math

from fivefold.core.layout import ORDER, Layout
from fivefold.model.config import ModelConfig
from fivefold.plan.export.flags import Flags, Writer
from fivefold.plan.search.found import Found

SHARDING = {2: "optim_grads", 3: "optim_grads_params"}


def megatron(found: Found) -> Flags:
    """The same model, layout and batch."""
    out = Writer()
    _model(out, found)
    _layout(out, found)
    _state(out, found.strategy.layout)
    _recompute(out, found)
    _precision(out, found)
    return out.done("Megatron-LM", f"torchrun --nproc-per-node {_per_node(found)} pretrain_gpt.py")


def _per_node(found: Found) -> int:
    return min(found.job.cluster.per_node, found.job.devices)


def _model(out: Writer, found: Found) -> None:
    shape, config = found.job.shape, found.job.shape.config
    out.add("num-layers", config.num_layers)
    out.add("hidden-size", config.hidden_size)
    out.add("ffn-hidden-size", config.intermediate_size)
    out.add("num-attention-heads", config.num_heads)
    if config.mla is None:
        out.add("kv-channels", config.head_dim)
        if config.num_kv_heads != config.num_heads:
            out.add("group-query-attention")
            out.add("num-query-groups", config.num_kv_heads)
    out.add("seq-length", found.job.training.sequence)
    out.add("max-position-embeddings", max(config.max_positions, found.job.training.sequence))
    if shape.learned_positions:
        out.add("position-embedding-type", "learned_absolute")
    else:
        out.add("position-embedding-type", "rope")
        out.add("rotary-base", int(config.ropes[0].theta))
        if config.ropes[0].kind != "default":
            out.note(f"rotary scaling {config.ropes[0].kind} has flags of its own")
    if shape.gated:
        out.add("swiglu" if config.activation == "silu" else "geglu")
    if not shape.norm_bias:
        out.add("normalization", "RMSNorm")
    if not config.mlp_bias:
        out.add("disable-bias-linear")
    if config.qkv_bias and not config.output_bias:
        out.add("add-qkv-bias")
    if config.qk_norm:
        out.add("qk-layernorm")
    if not config.tie_embeddings:
        out.add("untie-embeddings-and-output-weights")
    _latent(out, config)
    _experts(out, config)


def _latent(out: Writer, config: ModelConfig) -> None:
    mla = config.mla
    if mla is None:
        return
    out.add("multi-latent-attention")
    if mla.query_rank is not None:
        out.add("q-lora-rank", mla.query_rank)
    out.add("kv-lora-rank", mla.key_value_rank)
    out.add("qk-head-dim", mla.nope_dim)
    out.add("qk-pos-emb-head-dim", mla.rope_dim)
    out.add("v-head-dim", mla.value_dim)


def _experts(out: Writer, config: ModelConfig) -> None:
    moe = config.moe
    if moe is None:
        return
    out.add("num-experts", moe.experts)
    out.add("moe-router-topk", moe.top_k)
    out.add("moe-ffn-hidden-size", moe.expert_size)
    if moe.shared_size:
        out.add("moe-shared-expert-intermediate-size", moe.shared_size)
    if moe.score == "sigmoid":
        out.add("moe-router-score-function", "sigmoid")
    if moe.correction_bias:
        out.add("moe-router-enable-expert-bias")
    if moe.groups > 1:
        out.add("moe-router-num-groups", moe.groups)
        out.add("moe-router-group-topk", moe.top_groups)
    if not all(moe.sparse):
        out.add("moe-layer-freq", str([int(sparse) for sparse in moe.sparse]).replace(" ", ""))
    out.add("moe-grouped-gemm")
    out.add("moe-token-dispatcher-type", "alltoall")


def _layout(out: Writer, found: Found) -> None:
    layout, training = found.strategy.layout, found.job.training
    out.add("tensor-model-parallel-size", layout.tp)
    out.add("pipeline-model-parallel-size", layout.pp)
    out.add("context-parallel-size", layout.cp)
    if layout.ep > 1:
        out.add("expert-model-parallel-size", layout.ep)
        out.add("expert-tensor-parallel-size", 1)
    if layout.tp > 1 and layout.sequence_parallel:
        out.add("sequence-parallel")
    _context(out, layout)
    _schedule(out, layout)
    out.add("micro-batch-size", found.strategy.micro_batch)
    out.add("global-batch-size", training.global_batch)
    if training.tokens is not None:
        step = training.global_batch * training.sequence
        out.add("train-iters", math.ceil(training.tokens / step))
    if layout.order != ORDER and layout.pp > 1:
        if layout.order.index("pp") > layout.order.index("dp_shard"):
            out.add("use-tp-pp-dp-mapping")
        else:
            out.note(f"the order {'/'.join(layout.order)} is not one of Megatron's")


def _context(out: Writer, layout: Layout) -> None:
    if layout.cp == 1:
        return
    ring = {"ring": "p2p", "gather": "allgather"}[layout.cp_kind]
    if layout.ulysses == 1:
        out.add("cp-comm-type", ring)
    elif layout.ulysses == layout.cp:
        out.add("cp-comm-type", "a2a")
    else:
        out.add("cp-comm-type", "a2a+p2p")
        out.add("hierarchical-context-parallel-sizes", layout.ulysses, layout.cp // layout.ulysses)
        if layout.cp_kind == "gather":
            out.note("beside heads it shares keys and values in a ring, not by gathering")


def _schedule(out: Writer, layout: Layout) -> None:
    if layout.pp == 1 or layout.schedule == "1f1b":
        return
    if layout.schedule == "interleaved":
        out.add("num-virtual-stages-per-pipeline-rank", max(2, layout.virtual))
    else:
        out.note(f"it has no schedule {layout.schedule}: these flags run 1F1B, with its bubble")


def _state(out: Writer, layout: Layout) -> None:
    if layout.shards == 1:
        out.add("overlap-grad-reduce")
        return
    if layout.zero == 1:
        out.add("use-distributed-optimizer")
        out.add("overlap-grad-reduce")
        out.add("overlap-param-gather")
    else:
        out.add("use-megatron-fsdp")
        out.add("data-parallel-sharding-strategy", SHARDING[layout.zero])
        out.add("ckpt-format", "fsdp_dtensor")
    if layout.dp_replicate > 1:
        out.add("num-distributed-optimizer-instances", layout.dp_replicate)
    if layout.offload != "none":
        out.add("optimizer-cpu-offload")
    if layout.offload == "parameters":
        out.note("it offloads the optimizer only; parameters stay on the device")


def _recompute(out: Writer, found: Found) -> None:
    mode = found.strategy.recompute
    if mode == "selective":
        out.add("recompute-granularity", "selective")
        if found.job.software.selective == "products":
            out.note("its selective recomputation is of attention alone, and keeps more than ours")
    elif mode == "full":
        out.add("recompute-granularity", "full")
        out.add("recompute-method", "uniform")
        out.add("recompute-num-layers", 1)


def _precision(out: Writer, found: Found) -> None:
    form = found.job.training.compute
    if form == "fp16":
        out.add("fp16")
    elif form != "fp32":
        out.add("bf16")
    if form == "fp8":
        out.add("fp8-format", "hybrid")
    elif form == "mxfp8":
        out.add("fp8-format", "e4m3")
        out.add("fp8-recipe", "mxfp8")

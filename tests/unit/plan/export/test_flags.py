from __future__ import annotations

import shlex

import pytest

from fivefold.core.layout import Layout
from fivefold.plan.export.flags import Flags
from fivefold.plan.export.megatron import megatron
from fivefold.plan.export.sglang import sglang
from fivefold.plan.export.torchtitan import torchtitan
from fivefold.plan.export.vllm import vllm
from fivefold.plan.search.estimators import estimators
from fivefold.plan.search.found import Found, judge
from fivefold.plan.search.guess import parse_guess
from fivefold.plan.serving.speculation import Speculation
from fivefold.plan.serving.strategy import ServingStrategy
from fivefold.plan.workload import Strategy
from tests.unit.plan.search.jobs import job


def of(
    text: str,
    micro_batch: int = 1,
    recompute: str = "none",
    model: str = "llama-3.1-8b",
    **more: object,
) -> Found:
    asked = job(model, "2x8xH100", 4096, 128, **more)
    strategy = Strategy(parse_guess(text).layout, micro_batch, recompute)  # type: ignore[arg-type]
    return judge(asked, strategy, estimators())


def values(flags: Flags) -> dict[str, str]:
    """Flag to its values; those without have an empty one."""
    found: dict[str, str] = {}
    for line in flags.command.splitlines()[1:]:
        name, _, value = line.strip().removesuffix("\\").strip().partition(" ")
        found[name.removeprefix("--")] = " ".join(shlex.split(value))
    return found


def test_megatron_has_the_model_the_layout_and_the_batch() -> None:
    found = of("tp=2,pp=2,dp=4,zero=1,schedule=interleaved,virtual=4", 2, "full", tokens=1e9)
    flags = values(megatron(found))
    assert flags.items() >= {
        "num-layers": "32", "hidden-size": "4096", "ffn-hidden-size": "14336",
        "num-attention-heads": "32", "group-query-attention": "", "num-query-groups": "8",
        "seq-length": "4096", "rotary-base": "500000", "swiglu": "", "normalization": "RMSNorm",
        "disable-bias-linear": "", "untie-embeddings-and-output-weights": "",
        "tensor-model-parallel-size": "2", "pipeline-model-parallel-size": "2",
        "context-parallel-size": "1", "sequence-parallel": "",
        "num-virtual-stages-per-pipeline-rank": "4", "micro-batch-size": "2",
        "global-batch-size": "128", "train-iters": "1908", "use-distributed-optimizer": "",
        "recompute-granularity": "full", "recompute-method": "uniform",
        "recompute-num-layers": "1", "bf16": "",
    }.items()  # fmt: skip
    assert "expert-model-parallel-size" not in flags


@pytest.mark.parametrize(
    ("text", "has", "lacks"),
    [
        ("dp_replicate=16", {"overlap-grad-reduce": ""}, "use-distributed-optimizer"),
        ("dp=16,zero=2", {"data-parallel-sharding-strategy": "optim_grads"}, "overlap-param-gather"),
        ("dp=16,zero=3", {"data-parallel-sharding-strategy": "optim_grads_params"}, "sequence-parallel"),
        (
            "dp_replicate=2,dp_shard=8,zero=1", {"num-distributed-optimizer-instances": "2"},
            "use-megatron-fsdp",
        ),
        ("cp=4,dp=4", {"cp-comm-type": "p2p"}, "sequence-parallel"),
        ("cp=4,dp=4,cp_kind=gather", {"cp-comm-type": "allgather"}, "sequence-parallel"),
        ("cp=4,dp=4,ulysses=4", {"cp-comm-type": "a2a"}, "sequence-parallel"),
        (
            "cp=4,dp=4,ulysses=2",
            {"cp-comm-type": "a2a+p2p", "hierarchical-context-parallel-sizes": "2 2"}, "swiglu-",
        ),
        ("pp=2,dp=8,zero=1,order=dp_replicate/dp_shard/cp/pp/tp", {"use-tp-pp-dp-mapping": ""}, "x"),
        ("dp=16,zero=1,offload=optimizer", {"optimizer-cpu-offload": ""}, "x"),
    ],
)  # fmt: skip
def test_megatron_says_what_data_and_context_ranks_do(
    text: str, has: dict[str, str], lacks: str
) -> None:
    flags = values(megatron(of(text)))
    assert flags.items() >= has.items()
    assert lacks not in flags


def test_megatron_has_experts_and_latent_attention() -> None:
    flags = values(megatron(of("dp=16,ep=8,zero=1", model="deepseek-v3", compute="fp8")))
    assert flags.items() >= {
        "num-experts": "256", "moe-router-topk": "8", "moe-ffn-hidden-size": "2048",
        "moe-shared-expert-intermediate-size": "2048", "multi-latent-attention": "",
        "q-lora-rank": "1536", "kv-lora-rank": "512", "qk-head-dim": "128",
        "qk-pos-emb-head-dim": "64", "v-head-dim": "128", "expert-model-parallel-size": "8",
        "expert-tensor-parallel-size": "1", "fp8-format": "hybrid",
    }.items()  # fmt: skip
    assert flags["moe-layer-freq"].startswith("[0,0,0,1,1")


def test_what_has_no_equivalent_is_said() -> None:
    assert any("no schedule zbv" in n for n in megatron(of("pp=2,dp=8,zero=1,schedule=zbv")).notes)
    assert any("keeps more than ours" in n for n in megatron(of("dp=16", 1, "selective")).notes)
    notes = torchtitan(of("cp=4,dp=4,ulysses=2")).notes
    assert any("ulysses" in note for note in notes)
    assert any("zero=1 is its FSDP" in note for note in torchtitan(of("dp=16,zero=1")).notes)


def test_torchtitan_has_the_layout_and_the_batch() -> None:
    found = of(
        "tp=2,pp=2,dp_replicate=2,dp_shard=2,zero=3,schedule=interleaved,virtual=4", 2, "selective"
    )
    flags = values(torchtitan(found))
    assert flags == {
        "training.seq_len": "4096", "training.local_batch_size": "32",
        "training.global_batch_size": "128",
        "parallelism.data_parallel_replicate_degree": "2",
        "parallelism.data_parallel_shard_degree": "2", "parallelism.tensor_parallel_degree": "2",
        "parallelism.pipeline_parallel_degree": "2",
        "parallelism.pipeline_parallel_schedule": "Interleaved1F1B",
        "parallelism.pipeline_parallel_microbatch_size": "2",
        "parallelism.pipeline_parallel_layers_per_stage": "4",
        "parallelism.fsdp_reshard_after_forward": "always",
        "activation_checkpoint.mode": "selective",
        "activation_checkpoint.selective_ac_option": "op",
        "training.mixed_precision_param": "bfloat16",
    }  # fmt: skip
    assert values(torchtitan(of("cp=2,dp=8", compute="fp8")))["model.converters"] == "float8"
    assert "training.local_batch_size" in values(torchtitan(of("dp=16", 4)))
    assert values(torchtitan(of("dp=16", 4)))["training.local_batch_size"] == "4"


SERVED = ServingStrategy(
    Layout(tp=2, dp_shard=4, ep=8), weights="fp8", kv="fp8", max_sequences=64, token_budget=4096,
    block_size=64, memory_share=0.85, speculation=Speculation(0.7, 3),
)  # fmt: skip


def test_vllm() -> None:
    flags = vllm("deepseek-ai/DeepSeek-V3", SERVED, context=8192)
    assert flags.start == "vllm serve deepseek-ai/DeepSeek-V3"
    assert values(flags) == {
        "tensor-parallel-size": "2", "data-parallel-size": "4", "enable-expert-parallel": "",
        "quantization": "fp8", "kv-cache-dtype": "fp8", "max-model-len": "8192",
        "max-num-seqs": "64", "max-num-batched-tokens": "4096", "block-size": "64",
        "gpu-memory-utilization": "0.85",
        "speculative-config": '{"method": "ngram", "num_speculative_tokens": 3}',
    }  # fmt: skip
    plain = ServingStrategy(Layout(tp=4, pp=2, dp_replicate=3), weights="int4")
    shown = vllm("m", plain, role="prefill")
    assert values(shown)["pipeline-parallel-size"] == "2"
    assert "NixlConnector" in values(shown)["kv-transfer-config"]
    assert any("stored in int4" in note for note in shown.notes)
    assert any("start 3 of these" in note for note in shown.notes)


def test_sglang() -> None:
    flags = sglang("deepseek-ai/DeepSeek-V3", SERVED, context=8192, role="decode")
    assert values(flags) == {
        "tp-size": "8", "dp-size": "4", "enable-dp-attention": "", "ep-size": "8",
        "quantization": "fp8", "kv-cache-dtype": "fp8_e4m3", "context-length": "8192",
        "max-running-requests": "256", "chunked-prefill-size": "4096",
        "mem-fraction-static": "0.85", "page-size": "64", "speculative-algorithm": "EAGLE",
        "speculative-num-steps": "3", "speculative-eagle-topk": "1",
        "speculative-num-draft-tokens": "4", "disaggregation-mode": "decode",
    }  # fmt: skip

"""The typed configuration of a run: what a YAML file, a recipe or `--set` may say.

Every key is declared here with its meaning; unknown keys are refused (see `resolve`).
Sizes are in sequences or tokens as named, rates in units of one optimizer step.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from fivefold.core.layout import Layout


class Section(BaseModel):
    """A frozen part of the configuration that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class ModelSection(Section):
    """Which model: a name or path (`source`), or a Hugging Face style `config` given inline."""

    source: str | None = Field(
        None, description="Hugging Face folder, GGUF file, checkpoint folder, or `smollm2`"
    )
    config: dict[str, Any] | None = Field(None, description="keys of a Hugging Face config.json")
    init: Literal["auto", "random", "weights"] = Field(
        "auto",
        description="start from random values or from the source's weights; auto: weights"
        " where the source has them",
    )

    @model_validator(mode="after")
    def _one_origin(self) -> ModelSection:
        if (self.source is None) == (self.config is None):
            raise ValueError("give exactly one of `model.source` and `model.config`")
        if self.config is not None and self.init == "weights":
            raise ValueError("`model.init: weights` needs `model.source`")
        return self


def _source(value: Any) -> Any:
    return {"source": value} if isinstance(value, str) else value


class TrainSection(Section):
    """Length, batch and determinism of a run."""

    steps: int = Field(1000, ge=1, description="optimizer steps")
    seed: int = Field(0, ge=0, description="seed of initial values, shuffling and dropout")
    global_batch: int = Field(32, ge=1, description="sequences per optimizer step, over all ranks")
    micro_batch: int = Field(4, ge=1, description="sequences per forward pass of one rank")
    deterministic: bool = Field(True, description="same run, same bits")
    kernels: Literal["fast", "deterministic"] = Field(
        "fast", description="deterministic: a token's bits are those of serving, in any batch"
    )
    clip_norm: float | None = Field(1.0, gt=0, description="global gradient norm limit; null: none")
    z_loss: float = Field(0.0, ge=0, description="weight of log(Z)^2 in the loss")
    loss_chunk: int = Field(256, ge=1, description="tokens whose logits exist at one time")
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="activation checkpointing"
    )
    recompute_every: int = Field(1, ge=1, description="recompute every n-th block")
    compile: bool = Field(False, description="torch.compile each block")
    on_nan: Literal["stop"] = Field("stop", description="what to do when the loss is not finite")


class SourceSection(Section):
    """One data source of a mixture."""

    path: str = Field(description="folder or file, or `stdlib` (this Python's own source text)")
    kind: Literal["auto", "text", "jsonl", "parquet", "datasets", "stdlib"] = Field(
        "auto", description="auto: by the path's content"
    )
    field: str = Field("text", description="JSONL/Parquet field that holds the text")
    prompt: str = Field("prompt", description="field of the question, where records are pairs")
    completion: str = Field("completion", description="field of the answer, alone to be learnt")
    messages: str = Field("messages", description="field of a chat: [{role, content}, …]")
    weight: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="share of sequences in the mixture"
    )
    pattern: str = Field("**/*.txt", description="files of a text folder")


def _sources(value: Any) -> Any:
    if isinstance(value, str | dict):
        value = [value]
    if isinstance(value, list | tuple):
        return tuple({"path": v} if isinstance(v, str) else v for v in value)
    return value


class DataSection(Section):
    """What is read, and how it becomes sequences."""

    sources: Annotated[tuple[SourceSection, ...], BeforeValidator(_sources)] = Field(
        (SourceSection(path="stdlib"),), min_length=1, description="a mixture by weight"
    )
    tokenizer: str = Field(
        "auto", description="auto: the model's own; a path; or `bpe:N` trained on the data"
    )
    sequence_length: int = Field(512, ge=2, description="tokens per sequence")
    packing: Literal["pack", "pad"] = Field(
        "pack", description="pack documents end to end, or pad one document per sequence"
    )
    shuffle: bool = Field(True, description="order drawn from seed and epoch")
    evaluation_share: float = Field(
        0.02, ge=0, lt=0.5, description="share of documents held out, chosen by hash"
    )
    workers: int = Field(0, ge=0, description="tokenizing processes; 0: one per core")
    cache: str | None = Field(None, description="folder of tokenized shards; null: the user cache")


class OptimizerSection(Section):
    """AdamW and its schedule."""

    lr: float = Field(3e-4, gt=0, description="peak learning rate")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW momentum rates")
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0, description="on matrices; norms and biases get none")
    schedule: Literal["cosine", "linear", "wsd", "constant"] = Field("cosine")
    warmup: int = Field(0, ge=0, description="steps of linear warm-up")
    decay: float = Field(0.1, gt=0, le=1, description="wsd: share of the steps that decay")
    final_lr: float = Field(0.1, ge=0, le=1, description="end of the schedule, as share of lr")


class PrecisionSection(Section):
    """Number formats. Optimizer state and master parameters are fp32 (fp64 with `dtype: fp64`)."""

    dtype: Literal["fp32", "bf16", "fp16", "fp64"] = Field(
        "fp32", description="compute format; fp64: to compare layouts exactly"
    )
    reduce: Literal["fp32", "bf16"] = Field("fp32", description="gradient reduction format")
    loss_scale: float = Field(65536.0, gt=0, description="fp16: initial dynamic loss scale")


class MoESection(Section):
    """How load is kept even over experts. Coefficients add to the loss per token."""

    aux_loss: float = Field(0.0, ge=0, description="on a micro-batch's load; 0.001 to 0.01")
    sequence_aux_loss: float = Field(0.0, ge=0, description="on each sequence's load; 0.0001")
    router_z_loss: float = Field(0.0, ge=0, description="on log(sum(exp(logits)))^2; 0.001")
    bias_update_rate: float = Field(
        0.0, ge=0, description="DeepSeek-V3's bias, shifted after each step; 0.001"
    )
    capacity_factor: float | None = Field(
        None, gt=0, description="tokens an expert takes, over its even share; null: all"
    )


class CommunicationSection(Section):
    """How gradients travel between data ranks. See docs/axes/data.md."""

    bucket_mib: float = Field(
        25.0, gt=0, allow_inf_nan=False, description="MiB of fp32 gradients sent at a time"
    )
    compression: Literal["none", "fp16", "bf16", "powersgd", "topk"] = Field(
        "none", description="what is sent instead of whole gradients"
    )
    rank: int = Field(4, ge=1, description="powersgd: rank of a matrix's factors")
    ratio: float = Field(0.01, gt=0, le=1, description="topk: share of elements sent")
    warmup_steps: int = Field(
        0, ge=0, description="powersgd, topk: first steps that send whole gradients"
    )


class CheckpointSection(Section):
    """When state is saved and what is kept."""

    every: int = Field(100, ge=0, description="steps between checkpoints; 0: only at the end")
    keep: int = Field(2, ge=1, description="newest checkpoints kept (best is kept besides)")
    asynchronous: bool = Field(True, description="write while training goes on")
    resume: bool = Field(True, description="continue a run directory that has a checkpoint")


class EvaluateSection(Section):
    """Loss on held-out documents."""

    every: int = Field(0, ge=0, description="steps between evaluations; 0: only at the end")
    sequences: int = Field(32, ge=1, description="sequences per evaluation, over all ranks")


class ObserveSection(Section):
    """What a run shows and records beside metrics.jsonl."""

    progress: bool = Field(True, description="progress line on the terminal")
    tensorboard: bool = Field(True, description="event files under the run directory")
    pipeline_step: int = Field(
        2, ge=0, description="optimizer step whose pipeline times go to pipeline.json; 0: none"
    )
    mfu: bool = Field(True, description="measure this device's GEMM peak once, report MFU")


class RunConfig(Section):
    """Everything that determines a training run."""

    model: Annotated[ModelSection, BeforeValidator(_source)]
    layout: Layout = Layout()
    train: TrainSection = TrainSection()
    data: DataSection = DataSection()
    optimizer: OptimizerSection = OptimizerSection()
    precision: PrecisionSection = PrecisionSection()
    moe: MoESection = MoESection()
    communication: CommunicationSection = CommunicationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    evaluate: EvaluateSection = EvaluateSection()
    observe: ObserveSection = ObserveSection()

    @model_validator(mode="after")
    def _batches_divide(self) -> RunConfig:
        per_pass = self.train.micro_batch * self.layout.dp
        if self.train.global_batch % per_pass:
            raise ValueError(
                f"train.global_batch={self.train.global_batch} is not a multiple of "
                f"train.micro_batch={self.train.micro_batch} x {self.layout.dp} data ranks; set one of them so that it divides"
            )
        return self

    @model_validator(mode="after")
    def _memory_has_one_unit(self) -> RunConfig:
        kind = self.communication.compression
        if kind in ("powersgd", "topk") and self.precision.dtype == "fp16":
            raise ValueError(
                f"communication.compression={kind} carries gradients over from step to step, which "
                "the changing loss scale of precision.dtype=fp16 does not allow; use bf16 or fp32"
            )
        return self

"""The operators inside what torch wraps around modules: recomputation, the compiler, fake tensors."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fivefold.axes.recompute import recompute_blocks
from fivefold.kernels import dispatch
from fivefold.model.attention_backend import AttentionBackend, CausalAttention, PackedAttention
from fivefold.model.decoder import Block, Decoder
from fivefold.model.families import parse_config
from tests.operator_cases import (
    OPERATORS,
    assert_same_bits,
    deterministic,
    everything,
    inputs,
    results,
)

DTYPES = [torch.float32, torch.bfloat16]
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {
        "model_type": "qwen3", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 64, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
    },
    "mixtral": {
        "model_type": "mixtral", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "tie_word_embeddings": False, "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": None,
    },
}  # fmt: skip


class Calls(TorchDispatchMode):
    """Operators of this package that ran, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = operator.name()
        if name.startswith("fivefold::"):
            self.counts[name.removesuffix(".default")] += 1
        return operator(*args, **(kwargs or {}))


def test_the_case_has_every_operator() -> None:
    with deterministic(), Calls() as seen:
        results(everything(torch.float32), inputs(torch.float32))
    assert seen.counts.keys() >= OPERATORS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept", ["nothing", "attention", "products"])
def test_recomputed_in_backward(dtype: torch.dtype, kept: str) -> None:
    """Non-reentrant checkpoints, whole and with a policy that keeps some operators' results."""
    keep = {
        "nothing": set(),
        "attention": {torch.ops.fivefold.flash_attention.default},
        "products": {torch.ops.fivefold.multiply.default, torch.ops.fivefold.rms_norm.default},
    }[kept]

    def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in keep else CheckpointPolicy.PREFER_RECOMPUTE

    extra = {"context_fn": partial(create_selective_checkpoint_contexts, policy)} if keep else {}
    plain, wrapped = everything(dtype), everything(dtype)
    for name in ("attend", "feed", "judge"):
        setattr(wrapped, name, checkpoint_wrapper(getattr(wrapped, name), **extra))
    with deterministic():
        expected = results(plain, inputs(dtype))
        with Calls() as seen:
            assert_same_bits(results(wrapped, inputs(dtype)), expected)
    # Once in forward, and in backward once more unless it was kept.
    assert seen.counts["fivefold::flash_attention"] == (1 if kept == "attention" else 2)
    # This one again for the weight behind it, whose product does not keep its operand.
    assert seen.counts["fivefold::rms_norm"] == (2 if kept == "products" else 3)
    assert seen.counts["fivefold::linear_cross_entropy"] == 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recomputed", [False, True])
def test_compiled_as_one_graph(dtype: torch.dtype, recomputed: bool) -> None:
    torch._dynamo.reset()
    model = everything(dtype)
    if recomputed:
        for name in ("attend", "feed"):
            setattr(model, name, checkpoint_wrapper(getattr(model, name)))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with deterministic():
        expected = results(everything(dtype), inputs(dtype))
        assert_same_bits(results(compiled, inputs(dtype)), expected)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.float64])
def test_shapes_are_known_without_values(dtype: torch.dtype) -> None:
    """Results and gradients of fake tensors: sizes, strides and formats of the real ones."""
    real: list[tuple[Any, ...]] = []
    fake: list[tuple[Any, ...]] = []
    with deterministic():
        with Described(real):
            results(everything(dtype), inputs(dtype))
        with FakeTensorMode(), Described(fake):
            found = results(everything(dtype), inputs(dtype))
    assert all(isinstance(x, FakeTensor) for x in found.values())
    assert fake == real
    assert len(real) >= 2 * len(OPERATORS)


class Described(TorchDispatchMode):
    """(operator, then size, strides and format of each result) of this package's operators."""

    def __init__(self, into: list[tuple[Any, ...]]) -> None:
        super().__init__()
        self.into = into

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        if operator.name().startswith("fivefold::"):
            made = result if isinstance(result, tuple | list) else (result,)
            self.into.append(
                (operator.name(), *((tuple(x.shape), x.stride(), x.dtype) for x in made))
            )
        return result


def block(
    family: str, dtype: torch.dtype, wrap: str = "", **options: Any
) -> tuple[Decoder, nn.Module]:
    decoder = Decoder(parse_config(FAMILIES[family]))
    decoder.initialize(0)
    decoder.to(dtype)
    if wrap in ("full", "selective"):
        recompute_blocks(decoder.layers, wrap, 1)  # type: ignore[arg-type]
    if wrap == "compile":
        return decoder, torch.compile(decoder.layers[0], fullgraph=True, **options)
    return decoder, decoder.layers[0]


def run_block(
    decoder: Decoder, part: nn.Module, dtype: torch.dtype, backend: AttentionBackend
) -> dict[str, Tensor]:
    hidden = torch.randn(2, 17, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    hidden.requires_grad_()
    tables = decoder.rope_tables(torch.arange(17).expand(2, 17))[decoder.config.ropes[0]]
    out = part(hidden, tables, backend)
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    leaves = [hidden, *part.parameters()]
    grads = torch.autograd.grad(out, leaves, slope)
    return {"out": out.detach(), **{str(i): g for i, g in enumerate(grads)}}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_block_recomputed(mode: str, family: str, dtype: torch.dtype) -> None:
    with deterministic():
        expected = run_block(*block(family, dtype), dtype, CausalAttention())
        found = run_block(*block(family, dtype, mode), dtype, CausalAttention())
    assert_same_bits(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("policy", [True, False])
def test_a_block_compiled_as_one_graph(policy: bool, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    with dispatch.deterministic(policy):
        expected = run_block(*block("qwen3", dtype), dtype, CausalAttention())
        compiled = block("qwen3", dtype, "compile", backend="aot_eager")
        assert_same_bits(run_block(*compiled, dtype, CausalAttention()), expected)


def test_a_block_compiled_over_documents() -> None:
    """How many documents there are is a size that the graph does not know."""
    torch._dynamo.reset()
    documents = torch.tensor([[0] * 5 + [1] * 12, [2] * 16 + [-1]])
    with deterministic():
        expected = run_block(
            *block("qwen3", torch.bfloat16), torch.bfloat16, PackedAttention(documents)
        )
        compiled = block("qwen3", torch.bfloat16, "compile", backend="aot_eager")
        found = run_block(*compiled, torch.bfloat16, PackedAttention(documents))
    assert_same_bits(found, expected)


def test_a_block_compiled_to_machine_code() -> None:
    """What lies between our operators is fused and so rounds otherwise; they are the same calls."""
    torch._dynamo.reset()
    with deterministic():
        expected = run_block(*block("qwen3", torch.float32), torch.float32, CausalAttention())
        found = run_block(
            *block("qwen3", torch.float32, "compile"), torch.float32, CausalAttention()
        )
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def test_blocks_are_of_this_package() -> None:
    assert type(Decoder(parse_config(FAMILIES["qwen3"])).layers[0]) is Block

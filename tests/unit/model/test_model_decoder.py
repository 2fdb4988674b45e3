"""The decoder by itself: names, devices, formats, starting values, and what may wrap a block."""

from __future__ import annotations

import copy

import pytest
import torch
from model_cases import FAMILIES, config, decoder, logits, positions, tokens
from torch.utils.checkpoint import checkpoint

from fivefold.model.attention_backend import CausalAttention
from fivefold.model.decoder import Decoder, initial_value
from fivefold.model.families import weight_names

BOTH_TIES = pytest.mark.parametrize("tied", [True, False])


@BOTH_TIES
@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_has_one_name_in_hugging_face_files(family: str, tied: bool) -> None:
    model = decoder(family, tie_word_embeddings=tied)
    names = weight_names(model.config)
    assert list(dict(model.named_parameters())) == list(model.state_dict())
    assert set(names) == set(model.state_dict())
    assert len(set(names.values())) == len(names)
    assert ("head.weight" in names) is not tied
    assert (model.head is None) is tied
    assert model.head_weight() is (model.embedding.weight if tied else model.head.weight)


def test_names_are_those_of_the_contract() -> None:
    assert list(decoder("qwen3", num_hidden_layers=1).state_dict()) == [
        "embedding.weight",
        "layers.0.attention_norm.weight",
        "layers.0.attention.query.weight",
        "layers.0.attention.key.weight",
        "layers.0.attention.value.weight",
        "layers.0.attention.output.weight",
        "layers.0.attention.query_norm.weight",
        "layers.0.attention.key_norm.weight",
        "layers.0.feed_forward_norm.weight",
        "layers.0.feed_forward.gate.weight",
        "layers.0.feed_forward.up.weight",
        "layers.0.feed_forward.down.weight",
        "norm.weight",
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_on_the_meta_device_nothing_is_allocated_and_shapes_flow(family: str) -> None:
    before = torch.get_default_dtype()
    model = Decoder(config(family), device="meta", dtype=torch.bfloat16)
    assert torch.get_default_dtype() == before
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not list(model.buffers())
    ids = tokens(2, 9).to("meta")
    out = model.logits(model(ids, positions(2, 9).to("meta"), CausalAttention()))
    assert out.shape == (2, 9, 61)
    with torch.device("meta"):
        assert Decoder(config(family)).norm.weight.is_meta


@pytest.mark.parametrize("family", FAMILIES)
def test_materialised_from_meta_equals_made_in_place(family: str) -> None:
    made = decoder(family)
    loaded = Decoder(made.config, device="meta").to_empty(device="cpu")
    loaded.load_state_dict(made.state_dict())
    assert torch.equal(logits(loaded, tokens(2, 9)), logits(made, tokens(2, 9)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("family", FAMILIES)
def test_runs_and_differentiates_in_every_format(family: str, dtype: torch.dtype) -> None:
    wide, narrow = decoder(family), decoder(family, dtype=dtype)
    ids = tokens(2, 12)
    hidden = narrow(ids, positions(2, 12), CausalAttention())
    assert hidden.dtype == dtype
    scores = narrow.logits(hidden)
    assert scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = logits(wide, ids)
    error = (scores - expected).abs().max() / expected.abs().max()
    # Three layers of rounding to 8 or 11 bits; the parity tests hold this to transformers'.
    assert error < {torch.bfloat16: 0.1, torch.float16: 0.02, torch.float64: 1e-5}[dtype]
    scores.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in narrow.parameters())


def test_starting_values_depend_on_seed_and_name_alone() -> None:
    deep, shallow = (Decoder(config("llama", num_hidden_layers=n)) for n in (3, 1))
    narrow = Decoder(config("llama"), dtype=torch.bfloat16)
    for model in (deep, shallow, narrow):
        model.initialize(5)
    values = deep.state_dict()
    for name, value in shallow.state_dict().items():
        assert torch.equal(value, values[name])
    for name, value in narrow.state_dict().items():
        assert torch.equal(value, values[name].bfloat16())
    for name, value in values.items():
        assert torch.equal(value, initial_value(name, value.shape, deep.config, 5))
    first, second = (values[f"layers.{n}.attention.query.weight"] for n in (0, 1))
    assert not torch.equal(first, second)
    deep.initialize(6)
    again = Decoder(config("llama"))
    again.initialize(5)
    assert not torch.equal(deep.embedding.weight, again.embedding.weight)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_starting_values_are_spread_as_the_config_says(family: str) -> None:
    model = Decoder(config(family, vocab_size=4000, initializer_range=0.05))
    model.initialize(0)
    weight = model.embedding.weight
    assert weight.std().item() == pytest.approx(0.05, rel=0.02)
    assert weight.mean().item() == pytest.approx(0.0, abs=1e-3)
    expected = 0.0 if family == "gemma3_text" else 1.0  # gemma scales by one more
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == expected).all()
        if name.endswith("bias"):
            assert not parameter.any()


def test_the_embedding_scale_is_rounded_to_the_models_format() -> None:
    model = decoder("gemma3_text", dtype=torch.bfloat16, num_hidden_layers=1)
    seen = []
    model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    ids = tokens(1, 4)
    model(ids, positions(1, 4), CausalAttention())
    scale = torch.tensor(24**0.5).bfloat16()
    assert float(scale) != 24**0.5
    assert torch.equal(seen[0], model.embedding(ids) * scale)


def gradients(model: Decoder) -> dict[str, torch.Tensor]:
    model.zero_grad()
    logits(model, tokens(2, 9)).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_may_be_recomputed_in_backward(family: str) -> None:
    model = decoder(family)
    expected = gradients(model)
    for block in model.layers:
        plain = block.forward
        block.forward = lambda *a, plain=plain: checkpoint(plain, *a, use_reentrant=False)
    found = gradients(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", torch.bfloat16), ("gemma3_text", torch.float32)]
)
def test_blocks_may_be_compiled(family: str, dtype: torch.dtype) -> None:
    """Traced whole, forward and backward; the code generator behind is torch's own."""
    torch._dynamo.reset()
    model = decoder(family, dtype=dtype)
    compiled = copy.deepcopy(model)
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    for block in compiled.layers:
        block.compile(backend=count, fullgraph=True)
    expected, found = gradients(model), gradients(compiled)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name)
    # One graph for all blocks alike, not one a block: the window tells Gemma's two kinds apart,
    # and the first to meet a window also builds its mask.
    assert len(graphs) <= {"llama": 1, "gemma3_text": 3}[family]

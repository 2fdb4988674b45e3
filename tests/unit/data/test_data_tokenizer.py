"""Which tokenizer `data.tokenizer` names."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from data_cases import ByteTokenizer, section

from fivefold.core.config import DataSection
from fivefold.core.errors import ConfigError, DataError, FivefoldError
from fivefold.engines.train.data import tokenizer as module
from fivefold.engines.train.data.prepare import prepare
from fivefold.engines.train.data.tokenizer import iterate_documents, resolve_tokenizer
from fivefold.text.tokenizer import Tokenizer


@pytest.fixture
def config(tmp_path: Path, shared_data: Path) -> DataSection:
    path = shared_data / "tinyshakespeare" / "input.txt"
    return section(path, tmp_path / "cache", tokenizer="bpe:300")


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of text of each training."""
    sizes: list[int] = []

    def counting(texts: Iterator[str], vocab_size: int) -> Tokenizer:
        held = list(texts)
        sizes.append(sum(len(text.encode()) for text in held))
        return real(iter(held), vocab_size)

    real = Tokenizer.train_bpe
    monkeypatch.setattr(Tokenizer, "train_bpe", counting)
    return sizes


def test_auto_is_the_models_own() -> None:
    own = ByteTokenizer()
    assert resolve_tokenizer(DataSection(), lambda: own) is own  # type: ignore[arg-type,return-value]


def test_auto_without_a_model_says_what_to_set() -> None:
    with pytest.raises(ConfigError, match=r"set data\.tokenizer=bpe:4096"):
        resolve_tokenizer(DataSection(), None)


@pytest.mark.parametrize("name", ["bpe:", "bpe:x", "bpe:0", "bpe:-5", "bpe:259", "bpe:4k"])
def test_a_wrong_size_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not bpe:N with N of at least 260"):
        resolve_tokenizer(DataSection(tokenizer=name), None)


def test_a_missing_tokenizer_names_its_path(tmp_path: Path) -> None:
    with pytest.raises(FivefoldError, match="nowhere"):
        resolve_tokenizer(DataSection(tokenizer=str(tmp_path / "nowhere")), None)


def test_a_folder(tmp_path: Path, config: DataSection) -> None:
    trained = resolve_tokenizer(config, None)
    trained.save(tmp_path / "saved")
    loaded = resolve_tokenizer(DataSection(tokenizer=str(tmp_path / "saved")), None)
    assert loaded.fingerprint() == trained.fingerprint()


def test_trained_once_and_again_when_the_data_changes(
    tmp_path: Path, config: DataSection, trainings: list[int]
) -> None:
    first = resolve_tokenizer(config, None)
    assert resolve_tokenizer(config, None).fingerprint() == first.fingerprint()
    assert trainings == [1_115_394]
    assert first.vocab_size == 300
    assert first.decode(first.encode("To be, or not to be")) == "To be, or not to be"
    resolve_tokenizer(config, None, tmp_path / "elsewhere")
    assert len(trainings) == 2
    copy = tmp_path / "copy.txt"
    copy.write_bytes(Path(config.sources[0].path).read_bytes())
    other = section(copy, tmp_path / "cache", tokenizer="bpe:300")
    assert resolve_tokenizer(other, None).fingerprint() == first.fingerprint()
    copy.write_text("another text altogether " * 100)
    assert resolve_tokenizer(other, None).fingerprint() != first.fingerprint()
    assert len(trainings) == 4


def test_of_much_text_a_sample_from_everywhere_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainings: list[int]
) -> None:
    monkeypatch.setattr(module, "TRAINING_BYTES", 20_000)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "document {i:06d}"}}\n' for i in range(5000)))
    taken: list[str] = []
    monkeypatch.setattr(
        Tokenizer,
        "train_bpe",
        lambda texts, n: (taken.extend(texts), Tokenizer.from_folder(tmp_path / "saved"))[1],
    )
    ByteTokenizerFolder(tmp_path / "saved")
    resolve_tokenizer(section(path, tmp_path / "c", tokenizer="bpe:300"), None)
    numbers = [int(text.split()[1]) for text in taken]
    assert 500 < len(numbers) < 1300  # 20,000 of 140,000 bytes, of which 75,000 are text
    assert min(numbers) < 50 and max(numbers) > 4950
    assert numbers == sorted(numbers)


def ByteTokenizerFolder(folder: Path) -> None:  # noqa: N802
    special = {"eos_token": "<|endoftext|>"}
    Tokenizer(ByteTokenizer().backend, special_tokens=special).save(folder)


def test_processes_that_start_together_get_one_tokenizer(config: DataSection) -> None:
    code = textwrap.dedent(
        f"""
        from pathlib import Path
        from fivefold.core.config import DataSection
        from fivefold.engines.train.data.tokenizer import resolve_tokenizer
        config = DataSection(**{config.model_dump()!r})
        print(resolve_tokenizer(config, None).fingerprint())
        """
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0].strip() for process in started]
    assert len(set(outputs)) == 1 and len(outputs[0]) == 64


def test_documents_for_training_are_the_text_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}\n'
    )
    config = section(path, tmp_path / "c")
    assert list(iterate_documents(config, config.sources[0])) == ["q\na"]
    path.write_text('{"prompt": "q ", "completion": "a"}\n{"prompt": "", "completion": ""}\n')
    assert list(iterate_documents(config, config.sources[0])) == ["q a"]
    path.write_text('{"text": 1}\n')
    with pytest.raises(DataError, match=r"a\.jsonl line 1"):
        list(iterate_documents(config, config.sources[0]))


def test_the_default_corpus_is_prepared_with_its_own_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TRAINING_BYTES", 200_000)
    config = DataSection(cache=str(tmp_path), tokenizer="bpe:512")
    corpus = prepare(config, resolve_tokenizer(config, None), progress=False)
    manifest = corpus.sources[0].manifest
    assert manifest.dtype == "uint16"
    assert manifest.tokens > 1_000_000
    assert "argparse.py" in manifest.files and "asyncio/events.py" in manifest.files
    left_out = {"site-packages", "test", "idlelib", "encodings"}
    assert not any(left_out & set(name.split("/")) for name in manifest.files)
    assert len(corpus.documents(0, "evaluate")) > 0
    assert list((tmp_path / "tokenizers").iterdir())

"""Each kind of source gives the documents that are in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from data_cases import ByteTokenizer, section, texts_of

from fivefold.core.errors import DataError
from fivefold.engines.train.data.prepare import prepare


def test_text_folder(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "b.txt").write_text("two")
    (folder / "deep" / "a.txt").write_bytes(b"\xef\xbb\xbfthree\r\n")
    (folder / "a.txt").write_text("one")
    (folder / "empty.txt").touch()
    (folder / "c.md").write_text("another pattern")
    tokenizer = ByteTokenizer()
    corpus = prepare(section(folder, tmp_path / "c"), tokenizer, progress=False)
    assert texts_of(corpus, tokenizer) == ["one", "two", "three\r\n"]
    corpus = prepare(section(folder, tmp_path / "c", pattern="*.md"), tokenizer, progress=False)
    assert texts_of(corpus, tokenizer) == ["another pattern"]


def test_a_long_text_file_is_cut_at_line_ends(tmp_path: Path, shared_data: Path) -> None:
    path = shared_data / "tinyshakespeare" / "input.txt"
    tokenizer = ByteTokenizer()
    texts = texts_of(prepare(section(path, tmp_path / "c"), tokenizer, progress=False), tokenizer)
    assert "".join(texts) == path.read_bytes().decode()
    assert 50 < len(texts) < 70
    assert all(text.endswith("\n\n") for text in texts[:-1])


def test_a_text_without_line_ends_is_cut_between_characters(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("漢" * 30_000, "utf-8")
    tokenizer = ByteTokenizer()
    config = section(tmp_path / "a.txt", tmp_path / "c")
    texts = texts_of(prepare(config, tokenizer, progress=False), tokenizer)
    assert len(texts) > 3
    assert "".join(texts) == "漢" * 30_000


def test_cuts_do_not_depend_on_the_size_of_pieces(
    tmp_path: Path, shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shared_data / "tinyshakespeare" / "input.txt"
    monkeypatch.setattr("fivefold.engines.train.data.text_reader.PIECE_BYTES", 100_000)
    monkeypatch.setattr("fivefold.engines.train.data.tasks.TASK_BYTES", 1)
    tokenizer = ByteTokenizer()
    texts = texts_of(prepare(section(path, tmp_path / "c"), tokenizer, progress=False), tokenizer)
    assert "".join(texts) == path.read_bytes().decode()


def test_jsonl_in_small_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivefold.engines.train.data.jsonl_reader.PIECE_BYTES", 20)
    texts = [f"line {i} \u2028 \x0b {'x' * (i % 30)}" for i in range(50)]
    lines = [json.dumps({"text": t}, ensure_ascii=i % 2 == 0) for i, t in enumerate(texts)]
    (tmp_path / "a.jsonl").write_text("\r\n\n".join(lines), "utf-8")
    tokenizer = ByteTokenizer()
    config = section(tmp_path / "a.jsonl", tmp_path / "c")
    assert texts_of(prepare(config, tokenizer, progress=False), tokenizer) == texts
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "", "[]"]), "utf-8")
    with pytest.raises(DataError, match="line 52 is an empty list"):
        prepare(config, tokenizer, progress=False)


def test_test_files_are_left_out_of_a_folder_of_splits(tmp_path: Path, shared_data: Path) -> None:
    (tmp_path / "gsm8k").mkdir()
    for name, count in (("train.jsonl", 200), ("test.jsonl", 50)):
        lines = (shared_data / "gsm8k" / name).read_text("utf-8").splitlines()[:count]
        (tmp_path / "gsm8k" / name).write_text("\n".join(lines), "utf-8")
    fields = {"prompt": "question", "completion": "answer"}
    config = section(tmp_path / "gsm8k", tmp_path / "c", **fields)
    manifest = prepare(config, ByteTokenizer(), progress=False).sources[0].manifest
    assert (manifest.documents, list(manifest.files)) == (200, ["train.jsonl"])


def test_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    texts = [f"row {i}" for i in range(100)]
    folder = tmp_path / "data"
    folder.mkdir()
    pq.write_table(
        pa.table({"n": range(60), "text": texts[:60]}),
        folder / "train-0.parquet",
        row_group_size=7,
    )
    large = pa.table({"text": pa.array(texts[60:], pa.large_string())})
    pq.write_table(large, folder / "train-1.parquet")
    pq.write_table(pa.table({"text": ["held back"]}), folder / "test-0.parquet")
    tokenizer = ByteTokenizer()
    for kind in ("auto", "parquet", "datasets"):
        config = section(folder, tmp_path / kind, kind=kind)
        assert texts_of(prepare(config, tokenizer, progress=False), tokenizer) == texts


@pytest.mark.parametrize("how", ["auto", "datasets"])
def test_saved_dataset(tmp_path: Path, how: str) -> None:
    pa = pytest.importorskip("pyarrow")
    texts = [f"row {i}" for i in range(25)]
    (tmp_path / "ds" / "train").mkdir(parents=True)
    names = []
    for number, part in enumerate((texts[:10], texts[10:])):
        names.append(f"data-{number:05d}-of-00002.arrow")
        table = pa.table({"id": range(len(part)), "text": part})
        with pa.ipc.new_stream(tmp_path / "ds" / "train" / names[-1], table.schema) as stream:
            stream.write_table(table, max_chunksize=4)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (tmp_path / "ds" / "train" / "state.json").write_text(json.dumps(state))
    (tmp_path / "ds" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    tokenizer = ByteTokenizer()
    for path in (tmp_path / "ds", tmp_path / "ds" / "train"):
        config = section(path, tmp_path / "c", kind=how)
        assert texts_of(prepare(config, tokenizer, progress=False), tokenizer) == texts


def test_what_the_datasets_library_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    texts = [f"row {i}" for i in range(2500)]
    datasets.Dataset.from_dict({"text": texts, "n": list(range(2500))}).save_to_disk(tmp_path / "d")
    monkeypatch.setattr("fivefold.engines.train.data.columnar_reader.PIECE_BYTES", 4000)
    tokenizer = ByteTokenizer()
    assert (
        texts_of(
            prepare(section(tmp_path / "d", tmp_path / "c"), tokenizer, progress=False),
            tokenizer,
        )
        == texts
    )

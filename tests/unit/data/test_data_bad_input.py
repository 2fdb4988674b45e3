"""Every fault of a source is one line that names file and line, before anything is tokenized."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from data_cases import ByteTokenizer, ChatML, section

from fivefold.core.errors import DataError, FivefoldError, MissingExtraError
from fivefold.engines.train.data.prepare import prepare

pyarrow = pytest.importorskip("pyarrow")
GOOD = '{"text": "a line"}\n'
CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


def lines(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def text_file(name: str, content: str | bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return make


def parquet_file(table: dict) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table(table), folder / "t.parquet")
        return folder / "t.parquet"

    return make


def saved_dataset(**state: object) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / "ds").mkdir()
        (folder / "ds" / "state.json").write_text(json.dumps(state))
        return folder / "ds"

    return make


def folder_of(**files: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / "texts").mkdir()
        for name, content in files.items():
            (folder / "texts" / name.replace("_", ".")).write_text(content)
        return folder / "texts"

    return make


# What is given, and what the one line must say. {} stands for the path.
FAULTS = {
    "missing path": (lambda f: f / "nowhere.txt", "{} does not exist"),
    "near path": (lambda f: (text_file("notes.txt", "x")(f), f / "note.txt")[1], "did you mean 'notes.txt'?"),
    "empty folder": (folder_of(), "{} holds no file like '**/*.txt'; the folder is empty"),
    "other files": (folder_of(a_md="x", b_md="y"), "{} holds no file like '**/*.txt' (it holds 2 *.md)"),
    "empty file": (text_file("a.txt", ""), "{} is empty"),
    "folder of empty files": (folder_of(a_txt="", b_txt=""), "the 2 files of {} are empty"),
    "text not UTF-8": (
        text_file("a.txt", b"good\nbad \xff here\n"),
        "{} line 2: byte 0xff (at offset 9) is not UTF-8",
    ),
    "UTF-16": (text_file("a.txt", "text".encode("utf-16")), "{} line 1: byte 0xff"),
    "late in a long text": (
        text_file("a.txt", b"line\n" * 20000 + b"\xc3("),
        "{} line 20001: byte 0xc3",
    ),
    "JSONL not UTF-8": (
        text_file("a.jsonl", GOOD.encode() + b'{"text": "\xe9"}'),
        "{} line 2: byte 0xe9 is not UTF-8",
    ),
    "malformed JSONL": (
        text_file("a.jsonl", GOOD * 3 + '{"text": "open}\n' + GOOD),
        "{} line 4 is not JSON: Unterminated string starting at at column 10",
    ),
    "JSON, not JSONL": (text_file("a.json", "[]"), "{} is no text, JSONL or Parquet"),
    "pretty JSON": (text_file("a.jsonl", json.dumps({"text": "a"}, indent=1)), "{} line 1 is not JSON"),
    "compressed": (text_file("a.jsonl.gz", "x"), "unpack it"),
    "pickle": (text_file("a.pkl", "x"), "pickles are never read"),
    "blank lines": (text_file("a.jsonl", "\n\n  \n"), "{} holds only blank lines"),
    "a list": (text_file("a.jsonl", "[1]\n"), "{} line 1 is no object"),
    "a list later": (text_file("a.jsonl", GOOD + "[1]\n"), "{} line 2 is a list, not an object"),
    "null": (text_file("a.jsonl", GOOD + "null\n"), "{} line 2 is null"),
    "deep nesting": (text_file("a.jsonl", "[" * 100_000 + "\n"), "{} line 1 is nested too deeply"),
    "missing field": (
        text_file("a.jsonl", lines({"body": "x", "title": "y"})),
        "{} line 1 has no field 'messages' or 'prompt' with 'completion' or 'text'; "
        "its fields are: body, title",
    ),
    "missing field later": (
        text_file("a.jsonl", GOOD + "\n" + lines({"txet": "x"})),
        "{} line 3 has no field 'text'; its fields are: txet",
    ),
    "number": (text_file("a.jsonl", lines({"text": 7})), "{} line 1: field 'text' is a number, not text"),
    "null text": (text_file("a.jsonl", lines({"text": None})), "field 'text' is null, not text"),
    "half a surrogate": (text_file("a.jsonl", GOOD + '{"text": "\\ud800"}\n'), "{} line 2: field 'text' holds half"),
    "all empty": (text_file("a.jsonl", lines({"text": ""}, {"text": ""})), "{} holds no text"),
    "answer no text": (
        text_file("a.jsonl", lines({"prompt": "q", "completion": ["a"]})),
        "{} line 1: field 'completion' is a list, not text",
    ),
    "chat of no list": (text_file("a.jsonl", lines(CHAT, {"messages": "hi"})), "{} line 2: field 'messages' is text"),
    "chat of nothing": (text_file("a.jsonl", lines(CHAT, {"messages": []})), "{} line 2: field 'messages' is an empty list"),
    "chat without role": (
        text_file("a.jsonl", lines(CHAT, {"messages": [{"from": "a", "content": "b"}]})),
        "{} line 2: message 1 has no 'role'; its fields are: from, content",
    ),
    "chat content": (
        text_file("a.jsonl", lines(CHAT, {"messages": [{"role": "user", "content": 1}]})),
        "{} line 2: message 1: field 'content' is a number",
    ),
    "chat without answer": (
        text_file("a.jsonl", lines(CHAT, {"messages": CHAT["messages"][:1]})),
        "{} line 2 has no message of role 'assistant'",
    ),
    "Parquet that is none": (text_file("a.parquet", b"PAR1 no"), "cannot read {}:"),
    "Parquet column": (parquet_file({"body": ["x"]}), "{} has no field"),
    "Parquet type": (parquet_file({"text": [1, 2]}), "{}: column 'text' is int64, not text"),
    "Parquet null": (parquet_file({"text": ["a", None]}), "{} row 2: field 'text' is null"),
    "Parquet chat": (parquet_file({"messages": ["a"]}), "{}: column 'messages' is string, not a list of messages"),
    "dataset without files": (saved_dataset(_data_files=[]), "state.json names no data files"),
    "dataset out of its folder": (
        saved_dataset(_data_files=[{"filename": "../../etc/passwd"}]),
        "'../../etc/passwd', which is outside its folder",
    ),
    "dataset file missing": (saved_dataset(_data_files=[{"filename": "d.arrow"}]), "d.arrow is missing"),
    "dataset with index": (
        saved_dataset(_data_files=[{"filename": "d.arrow"}], _indices_data_files=[{"filename": "i"}]),
        "flatten_indices",
    ),
    "arrow that is none": (text_file("a.arrow", b"nothing of the kind"), "cannot read {}:"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_line(fault: str, tmp_path: Path) -> None:
    make, said = FAULTS[fault]
    (tmp_path / "in").mkdir()
    path = make(tmp_path / "in")
    with pytest.raises(DataError) as caught:
        prepare(section(path, tmp_path / "cache"), ByteTokenizer(ChatML()), progress=False)
    shown = str(caught.value)
    assert said.replace("{}", str(path)) in shown
    assert "\n" not in shown
    assert caught.value.mend
    # Nothing that could be taken for tokenized data is left.
    assert not list((tmp_path / "cache").rglob("manifest.json"))
    assert not list((tmp_path / "cache").rglob("*.tokens"))


def test_an_unreadable_file_names_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = text_file("a.txt", "text")(tmp_path)

    def refuse(*_: object, **__: object) -> object:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"a\.txt: Permission denied"):
        prepare(section(path, tmp_path / "cache"), ByteTokenizer(), progress=False)


def test_a_fault_at_the_end_is_found_before_anything_is_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = text_file("a.jsonl", GOOD * 80_000 + "{")(tmp_path)
    monkeypatch.setattr(
        "fivefold.engines.train.data.encode.Encoder.encode", lambda *_: pytest.fail("tokenized")
    )
    with pytest.raises(DataError, match="line 80001 is not JSON"):
        prepare(section(path, tmp_path / "cache"), ByteTokenizer(), progress=False)


def test_all_sources_are_found_before_the_first_is_tokenized(tmp_path: Path) -> None:
    good = text_file("a.txt", "text")(tmp_path)
    config = section(good, tmp_path / "cache").model_copy(
        update={
            "sources": (
                *section(good, tmp_path).sources,
                *section(tmp_path / "b.txt", tmp_path).sources,
            )
        }
    )
    with pytest.raises(DataError, match=r"b\.txt does not exist"):
        prepare(config, ByteTokenizer(), progress=False)
    assert not list((tmp_path / "cache").rglob("*.tokens"))


def test_a_chat_needs_a_template(tmp_path: Path) -> None:
    path = text_file("a.jsonl", lines(CHAT))(tmp_path)
    with pytest.raises(DataError, match="line 1 is a chat, but the tokenizer has no chat template"):
        prepare(section(path, tmp_path / "cache"), ByteTokenizer(), progress=False)


def test_a_template_that_refuses_names_the_line(tmp_path: Path) -> None:
    class Refusing(ChatML):
        def render(self, messages: list[dict], add_generation_prompt: bool = True) -> str:
            if messages[0]["role"] != "user":
                raise FivefoldError("roles must alternate", "mend them")
            return super().render(messages, add_generation_prompt)

    path = text_file("a.jsonl", lines(CHAT, {"messages": CHAT["messages"][1:]}))(tmp_path)
    with pytest.raises(DataError, match=r"line 2: roles must alternate; mend them"):
        prepare(section(path, tmp_path / "cache"), ByteTokenizer(Refusing()), progress=False)


def test_parquet_without_pyarrow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = parquet_file({"text": ["a"]})(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'fivefold\[parquet\]'"):
        prepare(section(path, tmp_path / "cache"), ByteTokenizer(), progress=False)


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = text_file("a.txt", "text")(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fivefold.engines.train.data.shards.ShardWriter.append", full)
    with pytest.raises(DataError, match="No space left on device; free space there"):
        prepare(section(path, tmp_path / "cache"), ByteTokenizer(), progress=False)
    assert not list((tmp_path / "cache").rglob("*.tokens"))


def test_a_cache_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    path = text_file("a.txt", "text")(tmp_path)
    with pytest.raises(DataError, match=r"set data\.cache to another folder"):
        prepare(section(path, path), ByteTokenizer(), progress=False)

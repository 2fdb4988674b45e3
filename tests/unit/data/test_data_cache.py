"""Tokenized once, again when something changed, and never read when damaged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from data_cases import ByteTokenizer, folder_of, section, texts_of

from fivefold.core.errors import DataError
from fivefold.engines.train.data.build import build
from fivefold.engines.train.data.prepare import prepare


def test_a_second_start_tokenizes_nothing(tmp_path: Path, builds: list[str]) -> None:
    (tmp_path / "a.txt").write_text("text")
    for _ in range(3):
        prepare(section(tmp_path / "a.txt", tmp_path / "c"), ByteTokenizer(), progress=False)
    assert len(builds) == 1


@pytest.mark.parametrize("change", ["edit", "same size", "add", "remove"])
def test_a_changed_source_is_noticed(
    tmp_path: Path, builds: list[str], capsys: pytest.CaptureFixture[str], change: str
) -> None:
    folder, tokenizer = tmp_path / "texts", ByteTokenizer()
    folder.mkdir()
    (folder / "a.txt").write_text("first")
    (folder / "b.txt").write_text("second")
    config = section(folder, tmp_path / "c")
    first = prepare(config, tokenizer, progress=False)
    if change == "edit":
        (folder / "b.txt").write_text("something else")
    elif change == "same size":
        (folder / "b.txt").write_text("SECOND")
    elif change == "add":
        (folder / "c.txt").write_text("third")
    else:
        (folder / "b.txt").unlink()
    capsys.readouterr()
    second = prepare(config, tokenizer, progress=False)
    assert len(builds) == 2
    said = capsys.readouterr().err
    verb = {"edit": "b.txt changed", "same size": "b.txt changed", "add": "c.txt was added"}
    assert f"has changed ({verb.get(change, 'b.txt was removed')})" in said
    assert said.count("\n") == 1
    assert texts_of(second, tokenizer) == [f.read_text() for f in sorted(folder.iterdir())]
    # Who had the old shards open keeps them.
    assert texts_of(first, tokenizer) == ["first", "second"]
    assert first.fingerprint != second.fingerprint


def test_a_touched_file_is_not_a_changed_one(tmp_path: Path, builds: list[str]) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text")
    prepare(section(path, tmp_path / "c"), ByteTokenizer(), progress=False)
    os.utime(path, (1, 1))
    prepare(section(path, tmp_path / "c"), ByteTokenizer(), progress=False)
    assert len(builds) == 1


def test_an_old_file_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text")
    os.utime(path, (10**9, 10**9))
    prepare(section(path, tmp_path / "c"), ByteTokenizer(), progress=False)
    real = Path.open

    def watched(self: Path, *args: object, **more: object) -> object:
        assert self != path
        return real(self, *args, **more)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", watched)
    prepare(section(path, tmp_path / "c"), ByteTokenizer(), progress=False)


@pytest.mark.parametrize(
    ("before", "after", "content"),
    [
        pytest.param(10**9, 10**9 + 1, "TEXT", id="another time"),
        pytest.param(10**9, 10**9, "longer text", id="another size"),
        # So young that the time may not have moved on: git's racy rule.
        pytest.param(None, None, "TEXT", id="same time, same size"),
    ],
)
def test_a_change_is_noticed_by_time_or_size_or_youth(
    tmp_path: Path, builds: list[str], before: int | None, after: int | None, content: str
) -> None:
    path, config = tmp_path / "a.txt", section(tmp_path / "a.txt", tmp_path / "c")
    path.write_text("text")
    now = path.stat().st_mtime
    os.utime(path, (before or now, before or now))
    prepare(config, ByteTokenizer(), progress=False)
    path.write_text(content)
    os.utime(path, (after or now, after or now))
    prepare(config, ByteTokenizer(), progress=False)
    assert len(builds) == 2


def test_another_tokenizer_has_another_folder(tmp_path: Path, builds: list[str]) -> None:
    (tmp_path / "a.txt").write_text("text")
    config = section(tmp_path / "a.txt", tmp_path / "c")
    for name in ("one", "two", "one"):
        prepare(config, ByteTokenizer(name=name), progress=False)
    assert len(builds) == 2
    assert len(list((tmp_path / "c" / "tokens").iterdir())) == 2


def test_the_split_needs_no_second_tokenizing(tmp_path: Path, builds: list[str]) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "row {i}"}}\n' for i in range(500)))
    sizes = []
    for share in (0.0, 0.1, 0.4):
        config = section(tmp_path / "a.jsonl", tmp_path / "c", evaluation_share=share)
        sizes.append(len(prepare(config, ByteTokenizer(), progress=False).documents(0, "evaluate")))
    assert len(builds) == 1
    assert sizes[0] == 0 and 25 < sizes[1] < 80 and 160 < sizes[2] < 240


def test_a_file_that_changes_meanwhile_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text")
    real = build.__globals__["source_form"]

    def meddling(source):  # type: ignore[no-untyped-def]
        path.write_text("longer text")
        return real(source)

    monkeypatch.setitem(build.__globals__, "source_form", meddling)
    with pytest.raises(DataError, match=r"a\.txt changed while it was tokenized"):
        prepare(section(path, tmp_path / "c"), ByteTokenizer(), progress=False)
    assert not list((tmp_path / "c").rglob("manifest.json"))


class TestDamage:
    """A damaged cache is refused by name, never read."""

    @pytest.fixture
    def cache(self, tmp_path: Path) -> Path:
        (tmp_path / "a.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 100)
        self.config = section(tmp_path / "a.jsonl", tmp_path / "c")
        prepare(self.config, ByteTokenizer(), progress=False)
        return folder_of(tmp_path / "c")

    @pytest.mark.parametrize("role", ["tokens", "offsets", "hashes", "learnt"])
    @pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
    def test_shards(self, cache: Path, role: str, damage: str) -> None:
        path = cache / f"shard-00000.{role}"
        data = path.read_bytes()
        if damage == "missing":
            path.unlink()
        else:
            flipped = bytes([data[0], data[1] ^ 4]) + data[2:]
            path.write_bytes(data[:-1] if damage == "truncated" else flipped)
        with pytest.raises(DataError, match=rf"{path}.*delete that folder"):
            prepare(self.config, ByteTokenizer(), progress=False)

    def test_manifest(self, cache: Path) -> None:
        path = cache / "manifest.json"
        path.write_text(path.read_text()[:-20])
        with pytest.raises(DataError, match=rf"{path} is damaged"):
            prepare(self.config, ByteTokenizer(), progress=False)

    def test_another_format_is_built_again(self, cache: Path) -> None:
        path = cache / "manifest.json"
        path.write_text(path.read_text().replace('"format": 1', '"format": 0'))
        prepare(self.config, ByteTokenizer(), progress=False)
        assert '"format": 1' in path.read_text()

    def test_the_memory_of_hashes_may_be_lost(self, cache: Path) -> None:
        for path in (cache.parents[2] / "sources").iterdir():
            path.write_text("{")
        prepare(self.config, ByteTokenizer(), progress=False)

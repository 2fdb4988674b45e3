"""Tokenized once, whole or not at all, and again when something changed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from data_cases import ByteTokenizer, section

from fivefold.core.errors import DataError
from fivefold.engines.train.data import prepare as module
from fivefold.engines.train.data.build import build
from fivefold.engines.train.data.corpus import Corpus
from fivefold.engines.train.data.prepare import prepare
from fivefold.text.tokenizer import Tokenizer

HELPERS = Path(__file__).parent


@pytest.fixture(scope="session")
def bpe() -> Tokenizer:
    texts = [Path(module.__file__).read_text("utf-8"), Path(__file__).read_text("utf-8")]
    return Tokenizer.train_bpe(iter(texts), 400)


def texts_of(corpus: Corpus, tokenizer: ByteTokenizer, number: int = 0) -> list[str]:
    source = corpus.sources[number]
    return [
        tokenizer.decode(source.tokens_at(np.arange(start, start + length))).removesuffix(
            "<|endoftext|>"
        )
        for start, length in zip(source.starts, source.lengths, strict=True)
    ]


def folder_of(cache: Path) -> Path:
    (manifest,) = (cache / "tokens").rglob("manifest.json")
    return manifest.parent


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of sources, each time one is tokenized."""
    names: list[str] = []

    def counting(source, *rest) -> None:  # type: ignore[no-untyped-def]
        names.append(source.name)
        build(source, *rest)

    monkeypatch.setattr(module, "build", counting)
    return names


class TestSources:
    """Each kind gives the documents that are in it."""

    def test_text_folder(self, tmp_path: Path) -> None:
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

    def test_a_long_text_file_is_cut_at_line_ends(self, tmp_path: Path, shared_data: Path) -> None:
        path = shared_data / "tinyshakespeare" / "input.txt"
        tokenizer = ByteTokenizer()
        texts = texts_of(
            prepare(section(path, tmp_path / "c"), tokenizer, progress=False), tokenizer
        )
        assert "".join(texts) == path.read_bytes().decode()
        assert 50 < len(texts) < 70
        assert all(text.endswith("\n\n") for text in texts[:-1])

    def test_a_text_without_line_ends_is_cut_between_characters(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("漢" * 30_000, "utf-8")
        tokenizer = ByteTokenizer()
        config = section(tmp_path / "a.txt", tmp_path / "c")
        texts = texts_of(prepare(config, tokenizer, progress=False), tokenizer)
        assert len(texts) > 3
        assert "".join(texts) == "漢" * 30_000

    def test_cuts_do_not_depend_on_the_size_of_pieces(
        self, tmp_path: Path, shared_data: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = shared_data / "tinyshakespeare" / "input.txt"
        monkeypatch.setattr("fivefold.engines.train.data.text_reader.PIECE_BYTES", 100_000)
        monkeypatch.setattr("fivefold.engines.train.data.tasks.TASK_BYTES", 1)
        tokenizer = ByteTokenizer()
        texts = texts_of(
            prepare(section(path, tmp_path / "c"), tokenizer, progress=False), tokenizer
        )
        assert "".join(texts) == path.read_bytes().decode()

    def test_jsonl_in_small_pieces(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

    def test_test_files_are_left_out_of_a_folder_of_splits(
        self, tmp_path: Path, shared_data: Path
    ) -> None:
        (tmp_path / "gsm8k").mkdir()
        for name, count in (("train.jsonl", 200), ("test.jsonl", 50)):
            lines = (shared_data / "gsm8k" / name).read_text("utf-8").splitlines()[:count]
            (tmp_path / "gsm8k" / name).write_text("\n".join(lines), "utf-8")
        fields = {"prompt": "question", "completion": "answer"}
        config = section(tmp_path / "gsm8k", tmp_path / "c", **fields)
        manifest = prepare(config, ByteTokenizer(), progress=False).sources[0].manifest
        assert (manifest.documents, list(manifest.files)) == (200, ["train.jsonl"])

    def test_parquet(self, tmp_path: Path) -> None:
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
    def test_saved_dataset(self, tmp_path: Path, how: str) -> None:
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

    def test_what_the_datasets_library_saved(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        datasets = pytest.importorskip("datasets")
        texts = [f"row {i}" for i in range(2500)]
        datasets.Dataset.from_dict({"text": texts, "n": list(range(2500))}).save_to_disk(
            tmp_path / "d"
        )
        monkeypatch.setattr("fivefold.engines.train.data.columnar_reader.PIECE_BYTES", 4000)
        tokenizer = ByteTokenizer()
        assert (
            texts_of(
                prepare(section(tmp_path / "d", tmp_path / "c"), tokenizer, progress=False),
                tokenizer,
            )
            == texts
        )


class TestOnce:
    """The work is done again when, and only when, something changed."""

    def test_a_second_start_tokenizes_nothing(self, tmp_path: Path, builds: list[str]) -> None:
        (tmp_path / "a.txt").write_text("text")
        for _ in range(3):
            prepare(section(tmp_path / "a.txt", tmp_path / "c"), ByteTokenizer(), progress=False)
        assert len(builds) == 1

    @pytest.mark.parametrize("change", ["edit", "same size", "add", "remove"])
    def test_a_changed_source_is_noticed(
        self, tmp_path: Path, builds: list[str], capsys: pytest.CaptureFixture[str], change: str
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

    def test_a_touched_file_is_not_a_changed_one(self, tmp_path: Path, builds: list[str]) -> None:
        path = tmp_path / "a.txt"
        path.write_text("text")
        prepare(section(path, tmp_path / "c"), ByteTokenizer(), progress=False)
        os.utime(path, (1, 1))
        prepare(section(path, tmp_path / "c"), ByteTokenizer(), progress=False)
        assert len(builds) == 1

    def test_an_old_file_is_not_read_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
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
        self, tmp_path: Path, builds: list[str], before: int | None, after: int | None, content: str
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

    def test_another_tokenizer_has_another_folder(self, tmp_path: Path, builds: list[str]) -> None:
        (tmp_path / "a.txt").write_text("text")
        config = section(tmp_path / "a.txt", tmp_path / "c")
        for name in ("one", "two", "one"):
            prepare(config, ByteTokenizer(name=name), progress=False)
        assert len(builds) == 2
        assert len(list((tmp_path / "c" / "tokens").iterdir())) == 2

    def test_the_split_needs_no_second_tokenizing(self, tmp_path: Path, builds: list[str]) -> None:
        (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "row {i}"}}\n' for i in range(500)))
        sizes = []
        for share in (0.0, 0.1, 0.4):
            config = section(tmp_path / "a.jsonl", tmp_path / "c", evaluation_share=share)
            sizes.append(
                len(prepare(config, ByteTokenizer(), progress=False).documents(0, "evaluate"))
            )
        assert len(builds) == 1
        assert sizes[0] == 0 and 25 < sizes[1] < 80 and 160 < sizes[2] < 240

    def test_a_file_that_changes_meanwhile_is_noticed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


SCRIPT = textwrap.dedent(
    """
    import sys, time
    sys.path.insert(0, sys.argv[1])
    from data_cases import ByteTokenizer, section
    from fivefold.engines.train.data import build, prepare
    from fivefold.engines.train.data.shards import ShardWriter
    append = ShardWriter.append
    def slow(self, encoded):
        append(self, encoded)
        print("working", flush=True)
        time.sleep(float(sys.argv[4]))
    ShardWriter.append = slow
    corpus = prepare.prepare(section(sys.argv[2], sys.argv[3]), ByteTokenizer(), progress=False)
    print("tokens", corpus.sources[0].manifest.tokens, flush=True)
    """
)


def start(source: Path, cache: Path, delay: float, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(HELPERS), str(source), str(cache), str(delay)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


class TestProcesses:
    """Several ranks at once, several tokenizing processes, and a kill in the middle."""

    def test_of_processes_that_start_together_one_works(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("text " * 50)
        started = []
        for rank in ("2", "1", "0"):  # the first rank is late, and works all the same
            environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "3"}
            started.append(start(tmp_path / "a.txt", tmp_path / "c", 0.5, **environment))
            time.sleep(1.5)
        outputs = [process.communicate(timeout=60)[0] for process in started]
        assert [process.returncode for process in started] == [0, 0, 0]
        assert all("tokens 251" in output for output in outputs)
        # The first rank works: it is the one that shows progress.
        assert ["working" in output for output in outputs] == [False, False, True]

    def test_threads_share_the_work_too(self, tmp_path: Path, builds: list[str]) -> None:
        (tmp_path / "a.txt").write_text("text")
        config = section(tmp_path / "a.txt", tmp_path / "c")
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: prepare(config, ByteTokenizer(), progress=False), range(8)))
        assert len(builds) == 1

    def test_a_kill_in_the_middle_leaves_nothing_that_is_taken_for_whole(
        self, tmp_path: Path
    ) -> None:
        source, cache = tmp_path / "a.txt", tmp_path / "c"
        source.write_text("text " * 50)
        process = start(source, cache, 60)
        assert process.stdout is not None and process.stdout.readline() == "working\n"
        process.kill()
        process.wait()
        process.stdout.close()
        assert list(cache.rglob("*.tokens")) and not list(cache.rglob("manifest.json"))
        corpus = prepare(section(source, cache), ByteTokenizer(), progress=False)
        assert corpus.sources[0].manifest.tokens == 251
        assert not list(cache.rglob("*.partial")) and not list(cache.rglob("*.old"))

    def test_a_kill_between_the_renames_is_made_good(self, tmp_path: Path) -> None:
        source, cache = tmp_path / "a.txt", tmp_path / "c"
        source.write_text("text")
        prepare(section(source, cache), ByteTokenizer(), progress=False)
        folder = folder_of(cache)
        folder.rename(folder.with_name(f"{folder.name}.old"))
        prepare(section(source, cache), ByteTokenizer(), progress=False)
        assert folder_of(cache) == folder

    def test_worker_processes_give_the_same_bytes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bpe: Tokenizer
    ) -> None:
        folder = tmp_path / "texts"
        folder.mkdir()
        for number in range(30):
            (folder / f"{number:02d}.txt").write_text(f"document {number}\n" * (number + 1))
        monkeypatch.setattr("fivefold.engines.train.data.tasks.TASK_BYTES", 500)
        shards = []
        for workers in (1, 3):
            config = section(folder, tmp_path / str(workers)).model_copy(
                update={"workers": workers}
            )
            monkeypatch.setattr("fivefold.engines.train.data.build.PARALLEL_BYTES", 0)
            prepare(config, bpe, progress=False)
            found = folder_of(tmp_path / str(workers))
            shards.append(
                {p.name: p.read_bytes() for p in found.iterdir() if p.name != "manifest.json"}
            )
            assert set(shards[-1]) == {
                "shard-00000.tokens",
                "shard-00000.offsets",
                "shard-00000.hashes",
            }
        assert shards[0] == shards[1]

    def test_a_fault_in_a_worker_process_is_the_same_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bpe: Tokenizer
    ) -> None:
        path = tmp_path / "a.jsonl"
        path.write_text('{"text": "a"}\n' * 9 + "{")
        monkeypatch.setattr("fivefold.engines.train.data.build.PARALLEL_BYTES", 0)
        config = section(path, tmp_path / "c").model_copy(update={"workers": 2})
        with pytest.raises(
            DataError, match=r"a\.jsonl line 10 is not JSON.*; write one object a line"
        ):
            prepare(config, bpe, progress=False)

    def test_a_worker_process_that_dies_is_named(self, tmp_path: Path, bpe: Tokenizer) -> None:
        from fivefold.engines.train.data.discover import discover
        from fivefold.engines.train.data.tasks import source_form, tasks_of
        from fivefold.engines.train.data.workers import worker_pool

        (tmp_path / "a.txt").write_text("text")
        found = discover(section(tmp_path / "a.txt", tmp_path / "c").sources[0])
        tasks = list(tasks_of(found, source_form(found)))
        with worker_pool(2, bpe, tmp_path) as pool:
            for process in pool._processes:
                process.kill()
            with pytest.raises(DataError, match=r"status -9 while reading .*a\.txt"):
                list(pool.check(tasks))

    def test_worker_processes_end_with_their_parent(self, tmp_path: Path, bpe: Tokenizer) -> None:
        bpe.save(tmp_path / "bpe")
        code = textwrap.dedent(
            f"""
            import time
            from pathlib import Path
            from fivefold.engines.train.data.workers import worker_pool
            from fivefold.text.tokenizer import Tokenizer
            with worker_pool(2, Tokenizer.from_folder("{tmp_path}/bpe"), Path("{tmp_path}")) as pool:
                print(*[p.pid for p in pool._processes], flush=True)
                time.sleep(60)
            """
        )
        parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        parent.stdout.close()
        assert len(pids) == 2
        deadline = time.monotonic() + 20
        while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        alive = [p for p in pids if Path(f"/proc/{p}/stat").exists()]
        assert all(Path(f"/proc/{p}/stat").read_text().split()[2] == "Z" for p in alive)

    def test_worker_processes_do_not_load_torch(self) -> None:
        code = "import sys, fivefold.engines.train.data.worker; print('torch' in sys.modules)"
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert run.stdout.strip() == "False"

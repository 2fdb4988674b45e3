"""Several ranks at once, several tokenizing processes, and a kill in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from data_cases import ByteTokenizer, folder_of, section

from fivefold.core.errors import DataError
from fivefold.engines.train.data.discover import discover
from fivefold.engines.train.data.prepare import prepare
from fivefold.engines.train.data.tasks import source_form, tasks_of
from fivefold.engines.train.data.workers import worker_pool
from fivefold.text.tokenizer import Tokenizer

HELPERS = Path(__file__).parent
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
    prepare.GIVE_WAY_SECONDS = 120  # however long the first rank takes to start
    print("started", flush=True)
    corpus = prepare.prepare(section(sys.argv[2], sys.argv[3]), ByteTokenizer(), progress=False)
    print("tokens", corpus.sources[0].manifest.tokens, flush=True)
    """
)


def start(source: Path, cache: Path, delay: float, **environment: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(HELPERS), str(source), str(cache), str(delay)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    assert process.stdout is not None and process.stdout.readline() == "started\n"
    return process


def test_of_processes_that_start_together_one_works(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text " * 50)
    started = []
    for rank in ("2", "1", "0"):  # the first rank is late, and works all the same
        environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "3"}
        started.append(start(tmp_path / "a.txt", tmp_path / "c", 0.5, **environment))
    outputs = [process.communicate(timeout=60)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0]
    assert all("tokens 251" in output for output in outputs)
    # The first rank works: it is the one that shows progress.
    assert ["working" in output for output in outputs] == [False, False, True]


def test_threads_share_the_work_too(tmp_path: Path, builds: list[str]) -> None:
    (tmp_path / "a.txt").write_text("text")
    config = section(tmp_path / "a.txt", tmp_path / "c")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: prepare(config, ByteTokenizer(), progress=False), range(8)))
    assert len(builds) == 1


def test_a_kill_in_the_middle_leaves_nothing_that_is_taken_for_whole(tmp_path: Path) -> None:
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


def test_a_kill_between_the_renames_is_made_good(tmp_path: Path) -> None:
    source, cache = tmp_path / "a.txt", tmp_path / "c"
    source.write_text("text")
    prepare(section(source, cache), ByteTokenizer(), progress=False)
    folder = folder_of(cache)
    folder.rename(folder.with_name(f"{folder.name}.old"))
    prepare(section(source, cache), ByteTokenizer(), progress=False)
    assert folder_of(cache) == folder


def test_worker_processes_give_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bpe: Tokenizer
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number:02d}.txt").write_text(f"document {number}\n" * (number + 1))
    monkeypatch.setattr("fivefold.engines.train.data.tasks.TASK_BYTES", 500)
    shards = []
    for workers in (1, 3):
        config = section(folder, tmp_path / str(workers)).model_copy(update={"workers": workers})
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bpe: Tokenizer
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' * 9 + "{")
    monkeypatch.setattr("fivefold.engines.train.data.build.PARALLEL_BYTES", 0)
    config = section(path, tmp_path / "c").model_copy(update={"workers": 2})
    with pytest.raises(DataError, match=r"a\.jsonl line 10 is not JSON.*; write one object a line"):
        prepare(config, bpe, progress=False)


def test_a_worker_process_that_dies_is_named(tmp_path: Path, bpe: Tokenizer) -> None:

    (tmp_path / "a.txt").write_text("text")
    found = discover(section(tmp_path / "a.txt", tmp_path / "c").sources[0])
    tasks = list(tasks_of(found, source_form(found)))
    with worker_pool(2, bpe, tmp_path) as pool:
        for process in pool._processes:
            process.kill()
        with pytest.raises(DataError, match=r"status -9 while reading .*a\.txt"):
            list(pool.check(tasks))


def test_worker_processes_end_with_their_parent(tmp_path: Path, bpe: Tokenizer) -> None:
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


def test_worker_processes_do_not_load_torch() -> None:
    code = "import sys, fivefold.engines.train.data.worker; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"

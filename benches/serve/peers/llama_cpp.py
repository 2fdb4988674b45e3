"""llama.cpp through its C API: batches of sequences that its Python class does not offer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from peers.peer import Options, Peer

UBATCH = 512
FORMATS = {"bf16": "LLAMA_FTYPE_MOSTLY_BF16", "q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0"}
REQUANTIZE = """
import sys, llama_cpp
params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.allow_requantize = getattr(llama_cpp, sys.argv[3]), True
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), params))
"""


class LlamaCpp(Peer):
    """Weights requantized from the Q4_1 file; the likeliest token is picked with NumPy."""

    name = "llama.cpp"
    module = "llama_cpp"
    packages = ("--no-binary", "llama-cpp-python", "llama-cpp-python[server]==0.3.36")
    build = {"CMAKE_ARGS": "-DGGML_NATIVE=ON"}  # noqa: RUF012
    dtypes = ("bf16", "q8_0")
    text_only = True

    def load(self) -> None:
        import llama_cpp

        self.lib: Any = llama_cpp
        llama_cpp.llama_backend_init()
        path = str(requantized(self.options, sys.executable)).encode()
        params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(path, params)
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self.contexts: dict[tuple[int, int], Any] = {}

    def answer(self, prompts: list[list[int]], output: int) -> list[int]:
        import numpy as np

        lib, length = self.lib, len(prompts[0])
        context = self._context(len(prompts), length + output)
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        last = [0] * len(prompts)
        for sequence, ids in enumerate(prompts):
            for start in range(0, length, UBATCH):
                piece = ids[start : start + UBATCH]
                rows = [(token, start + i, sequence) for i, token in enumerate(piece)]
                self._decode(context, rows, only_last=True)
            last[sequence] = self._likeliest(context, -1, np)
        for step in range(output - 1):
            rows = [(token, length + step, sequence) for sequence, token in enumerate(last)]
            self._decode(context, rows, only_last=False)
            last = [self._likeliest(context, row, np) for row in range(len(prompts))]
        return [output] * len(prompts)

    def _context(self, sequences: int, length: int) -> Any:
        key = (sequences, length)
        if key not in self.contexts:
            params = self.lib.llama_context_default_params()
            params.n_ctx = sequences * -(-length // 256) * 256
            params.n_batch = params.n_ubatch = UBATCH
            params.n_seq_max = sequences
            params.kv_unified = False
            params.n_threads = params.n_threads_batch = self.options.threads
            self.contexts[key] = self.lib.llama_init_from_model(self.model, params)
        return self.contexts[key]

    def _decode(self, context: Any, rows: list[tuple[int, int, int]], *, only_last: bool) -> None:
        batch = self.lib.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for row, (token, position, sequence) in enumerate(rows):
            batch.token[row], batch.pos[row] = token, position
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
            batch.logits[row] = not only_last or row == len(rows) - 1
        status = self.lib.llama_decode(context, batch)
        self.lib.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode gave {status}")

    def _likeliest(self, context: Any, row: int, np: Any) -> int:
        logits = self.lib.llama_get_logits_ith(context, row)
        return int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())

    @staticmethod
    def server(options: Options, python: str, port: int) -> list[str]:
        return [
            python, "-m", "llama_cpp.server", "--model", str(requantized(options, python)),
            "--port", str(port), "--n_threads", str(options.threads),
            "--n_threads_batch", str(options.threads), "--n_ctx", "2048",
            "--interrupt_requests", "false",
        ]  # fmt: skip


def requantized(options: Options, python: str) -> Path:
    """The weights in the wanted format, made once beside the folder by the peer's own Python."""
    path = options.folder.parent / f"smollm2-{options.dtype}.gguf"
    if not path.exists():
        partial = path.with_suffix(".partial")
        command = [python, "-c", REQUANTIZE, options.gguf, partial, FORMATS[options.dtype]]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            raise RuntimeError(f"cannot requantize {options.gguf}")
        partial.rename(path)
    return path

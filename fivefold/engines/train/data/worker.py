"""A tokenizing process: `python -m fivefold.engines.train.data.worker`.

Reads one JSON request a line from standard input and answers each with one JSON line; ends when
its input does, so it never outlives its parent. It does not load torch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from fivefold.core.errors import FivefoldError, TokenizerError
from fivefold.engines.train.data.encode import Encoder
from fivefold.engines.train.data.tasks import Task
from fivefold.text.tokenizer import Tokenizer


class Worker:
    """Does requests; loads its tokenizer at the first that needs one."""

    def __init__(self) -> None:
        self._encoder: Encoder | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """{"task"} or {"task", "out", "tokenizer", "fingerprint"} to {"documents"} or {"error"}."""
        task = Task.from_json(request["task"])
        try:
            if "out" not in request:
                return {"documents": count_documents(task)}
            if self._encoder is None:
                self._encoder = Encoder(_load(Path(request["tokenizer"]), request["fingerprint"]))
            encoded = self._encoder.encode(task)
            encoded.save(Path(request["out"]))
            return {"documents": len(encoded.lengths)}
        except FivefoldError as error:
            return {"error": [type(error).__name__, error.message, error.mend]}
        except OSError as error:
            return {
                "error": [
                    "DataError",
                    f"{error.filename or request.get('out')}: {error.strerror}",
                    "",
                ]
            }


def count_documents(task: Task) -> int:
    """Read a task through, tokenizing nothing. Raises DataError naming what is wrong and where."""
    return sum(document is not None for document in task.documents())


def _load(folder: Path, fingerprint: str) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(folder)
    if tokenizer.fingerprint() != fingerprint:
        raise TokenizerError(
            "the tokenizer is another after it was saved and loaded again", "set data.workers=1"
        )
    return tokenizer


def main() -> None:
    """Serve until standard input ends."""
    # The parent runs one process a core: the tokenizer's own threads would only fight for them.
    os.environ.update(TOKENIZERS_PARALLELISM="false")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends this
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # a stray print must not look like an answer
    worker = Worker()
    for line in sys.stdin:
        answers.write(json.dumps(worker.answer(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()

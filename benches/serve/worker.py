"""One peer in a process of its own: a JSON line in, a JSON line out.

Started by run.py with the Python of the peer's venv.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parent))


def main() -> None:
    name, given = sys.argv[1], json.loads(sys.argv[2])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log
    from peers import PEERS
    from peers.peer import Options

    options = Options(Path(given["folder"]), Path(given["gguf"]), given["dtype"], given["threads"])
    peer = PEERS[name](options)
    began = time.perf_counter()
    peer.load()
    tell(out, {"loaded": time.perf_counter() - began})
    for line in sys.stdin:
        asked = json.loads(line)
        began = time.perf_counter()
        counts = peer.answer(asked["prompts"], asked["output"])
        seconds = time.perf_counter() - began
        tell(out, {"seconds": seconds, "counts": counts})


def tell(out: TextIO, record: dict[str, Any]) -> None:
    out.write(json.dumps(record) + "\n")
    out.flush()


if __name__ == "__main__":
    main()

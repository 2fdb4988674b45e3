"""Sets a peer up in a virtual environment of its own, by name.

    python benches/serve/venvs.py vllm llama.cpp openvino
    python benches/serve/venvs.py                   # which are here

They lie in ~/.cache/fivefold/peers. llama.cpp is built for this machine, which takes minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from peers import PEERS
from peers.peer import Peer

FOLDER = Path.home() / ".cache" / "fivefold" / "peers"


def python_of(peer: type[Peer]) -> Path:
    """The Python that has the peer's packages, if it is set up."""
    return FOLDER / peer.name / "bin" / "python" if peer.packages else Path(sys.executable)


def is_installed(peer: type[Peer]) -> bool:
    """Whether its Python finds it."""
    python = python_of(peer)
    if not python.exists():
        return False
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({peer.module!r}) is None)"
    return subprocess.run([python, "-c", code], check=False).returncode == 0


def set_up(peer: type[Peer]) -> None:
    """Make its environment and install it."""
    if not peer.packages:
        raise SystemExit(f"{peer.name} runs in the environment of fivefold: pip install '.[test]'")
    python = python_of(peer)
    subprocess.run([sys.executable, "-m", "venv", FOLDER / peer.name], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--upgrade", "pip"], check=True)
    environment = os.environ | peer.build
    subprocess.run([python, "-m", "pip", "install", *peer.packages], check=True, env=environment)
    if peer.unwanted:
        subprocess.run([python, "-m", "pip", "uninstall", "--yes", *peer.unwanted], check=True)


def main() -> None:
    for name in sys.argv[1:]:
        if name not in PEERS:
            raise SystemExit(f"there is no peer {name!r}; known: {', '.join(PEERS)}")
        set_up(PEERS[name])
    for name, peer in PEERS.items():
        print(f"{name:<13} {'installed' if is_installed(peer) else 'not installed'}")


if __name__ == "__main__":
    main()

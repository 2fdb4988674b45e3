"""The engines that are compared, one file each."""

from __future__ import annotations

from peers.llama_cpp import LlamaCpp
from peers.openvino import OpenVino
from peers.ours import Fivefold
from peers.peer import Peer
from peers.transformers import Transformers
from peers.vllm import Vllm

PEERS: dict[str, type[Peer]] = {
    peer.name: peer for peer in (Fivefold, Transformers, Vllm, LlamaCpp, OpenVino)
}

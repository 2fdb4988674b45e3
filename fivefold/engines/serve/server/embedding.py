"""Hidden states of a prompt, pooled to one vector. Runs in the engine's process."""

from __future__ import annotations

# S sequence, D hidden
import torch

from fivefold.engines.serve.server.messages import Pooling
from fivefold.model.attention_backend import CausalAttention
from fivefold.model.decoder import Decoder


@torch.inference_mode()
def embed(decoder: Decoder, prompt: list[int], pooling: Pooling) -> list[float]:
    """[D]: the mean over the prompt's states after the final norm, in fp32, or the last one."""
    device = decoder.head_weight().device
    tokens = torch.tensor([prompt], device=device)
    positions = torch.arange(len(prompt), device=device)[None]
    states = decoder(tokens, positions, CausalAttention())[0].float()
    pooled = states.mean(dim=0) if pooling == "mean" else states[-1]
    return pooled.tolist()

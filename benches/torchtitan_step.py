"""The same training step by torchtitan's own modules, loss and optimizer settings.

torchtitan offers its language models flex or varlen attention alone, which do not train on a CPU;
its causal scaled-dot-product attention is put in their place. Weights are drawn anew: the step's
work does not depend on them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch


def is_installed() -> bool:
    """Whether `torchtitan` can be imported."""
    return importlib.util.find_spec("torchtitan") is not None


def torchtitan(shape: dict[str, Any], dtype: str, tokens: torch.Tensor) -> Callable[[], float]:
    """A step: forward, chunked loss, backward, clip, fused AdamW. bf16 runs under autocast."""
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss

    model = _model(shape, tokens.shape[1])
    model._skip_lm_head = True
    loss = ChunkedLossWrapper.Config(
        loss_fn=CrossEntropyLoss.Config(global_vocab_size=shape["vocab_size"])
    ).build()
    loss.set_lm_head(model.lm_head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    labels = torch.full_like(tokens, -100)
    labels[:, :-1] = tokens[:, 1:]
    positions = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
    valid = (labels != -100).sum().float()

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            found, _ = loss(model(tokens, positions=positions), labels, valid)
        found.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(found.detach())

    return step


def _model(shape: dict[str, Any], sequence: int) -> Any:
    from torchtitan.models import llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention

    width, vocabulary = shape["hidden_size"], shape["vocab_size"]
    layers = llama3._build_llama3_layers(
        n_layers=shape["num_hidden_layers"],
        dim=width,
        n_heads=shape["num_attention_heads"],
        n_kv_heads=shape["num_key_value_heads"],
        hidden_dim=shape["intermediate_size"],
        rope=llama3.ComplexRoPE.Config(
            dim=width // shape["num_attention_heads"],
            max_seq_len=sequence,
            theta=shape["rope_theta"],
            scaling="none",
        ),
        attn_backend="flex",
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    ScaledDotProductAttention.sdpa_backends = [
        torch.nn.attention.SDPBackend.FLASH_ATTENTION,
        torch.nn.attention.SDPBackend.MATH,
    ]
    config = llama3.Llama3Model.Config(
        dim=width,
        vocab_size=vocabulary,
        enable_weight_tying=True,
        tok_embeddings=llama3.Embedding.Config(
            num_embeddings=vocabulary,
            embedding_dim=width,
            param_init=llama3._EMBEDDING_SKIP_INIT,
        ),
        norm=llama3.RMSNorm.Config(normalized_shape=width, param_init=llama3._NORM_INIT),
        lm_head=llama3.Linear.Config(
            in_features=width,
            out_features=vocabulary,
            param_init=llama3._output_linear_init(width),
        ),
        layers=layers,
    )
    model = config.build()
    model.init_states()
    return model.train()

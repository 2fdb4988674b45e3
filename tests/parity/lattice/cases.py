"""Three steps of a small model on any layout, with every gradient, as a function for workers."""

from __future__ import annotations

from typing import Any

import torch

from tests.dist.cases import Run, whole

DENSE = {
    "model_type": "llama", "vocab_size": 131, "hidden_size": 32, "intermediate_size": 56,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "tie_word_embeddings": False, "initializer_range": 0.08,
    "attention_bias": True, "mlp_bias": True,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "tied": {
        **DENSE, "model_type": "qwen3", "tie_word_embeddings": True, "attention_bias": False,
    },
}  # fmt: skip
STEPS = 3


def train(
    layout: str, model: str, dtype: str = "fp64", options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """(loss, norm) of each step, each step's gradients, the final masters and moments."""
    run = Run(layout, MODELS[model], dtype, **(options or {}))
    gradients: list[dict[str, torch.Tensor]] = []
    reduce = run.axis.reduce

    def recorded() -> None:
        reduce()
        masters = run.axis.masters()
        gradients.append(whole({n: masters[n].like(g) for n, g in run.axis.gradients().items()}))

    run.axis.reduce = recorded  # type: ignore[method-assign]
    rows = run.steps(0, STEPS, micro_batch=1)
    return {"rows": rows, "gradients": gradients, "state": run.state()}

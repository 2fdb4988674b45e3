"""GPT as OpenAI and Megatron-LM have it: learned positions, LayerNorm, GELU, biases everywhere."""

from __future__ import annotations

from fivefold.core.errors import PlanError
from fivefold.model.config import ModelConfig, RopeConfig
from fivefold.plan.shape import ModelShape


def gpt(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    *,
    vocabulary: int = 51_200,
    positions: int = 2048,
    intermediate: int | None = None,
    source: str = "",
) -> ModelShape:
    """Its feed-forward is four times as wide as the hidden state; the head is the embedding.

    The count is L (12 D^2 + 13 D) + (V + P + 2) D, where SC21's equation 2 leaves out the last norm.
    Raises PlanError where heads do not divide the width.
    """
    if hidden % heads:
        raise PlanError(
            f"{name}: hidden={hidden} is no multiple of heads={heads}", "mend one of the two"
        )
    config = ModelConfig(
        family="gpt",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate or 4 * hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_positions=positions,
        windows=(None,) * layers,
        ropes=(RopeConfig(),) * layers,  # not applied: positions are learned
        tie_embeddings=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        activation="gelu_tanh",
    )
    return ModelShape(
        name=name,
        config=config,
        gated=False,
        norm_bias=True,
        learned_positions=positions,
        source=source,
        runs=False,
    )


_GPT3 = "Brown et al. 2020 (2005.14165), table 2.1"
_SC21 = "Narayanan et al. 2021 (2104.04473), table 1"
_KORTHIKANTI = "Korthikanti et al. 2022 (2205.05198), table 3"

# name: layers, hidden, heads, vocabulary, source
_PUBLISHED: dict[str, tuple[int, int, int, int, str]] = {
    "gpt2-124m": (12, 768, 12, 50_257, "Radford et al. 2019, and its config.json"),
    "gpt2-medium": (24, 1024, 16, 50_257, "Radford et al. 2019, and its config.json"),
    "gpt2-large": (36, 1280, 20, 50_257, "Radford et al. 2019, and its config.json"),
    "gpt2-xl": (48, 1600, 25, 50_257, "Radford et al. 2019, and its config.json"),
    "gpt3-1.3b": (24, 2048, 16, 50_257, f"{_GPT3}: 24 heads of 128 there do not divide 2048"),
    "gpt3-2.7b": (32, 2560, 32, 50_257, _GPT3),
    "gpt3-6.7b": (32, 4096, 32, 50_257, _GPT3),
    "gpt3-13b": (40, 5120, 40, 50_257, f"{_GPT3}: 5140 there is no multiple of 40 heads"),
    "gpt3-175b": (96, 12_288, 96, 50_257, _GPT3),
    "megatron-1.7b": (24, 2304, 24, 51_200, _SC21),
    "megatron-3.6b": (30, 3072, 32, 51_200, _SC21),
    "megatron-7.5b": (36, 4096, 32, 51_200, _SC21),
    "megatron-18.4b": (40, 6144, 48, 51_200, _SC21),
    "megatron-22b": (48, 6144, 64, 51_200, _KORTHIKANTI),
    "megatron-39.1b": (48, 8192, 64, 51_200, _SC21),
    "megatron-76.1b": (60, 10_240, 80, 51_200, _SC21),
    "megatron-145.6b": (80, 12_288, 96, 51_200, _SC21),
    "megatron-175b": (96, 12_288, 96, 51_200, _KORTHIKANTI),
    "megatron-310.1b": (96, 16_384, 128, 51_200, _SC21),
    "megatron-530b": (105, 20_480, 128, 51_200, _KORTHIKANTI),
    "megatron-1008b": (128, 25_600, 160, 51_200, _SC21),
}


def gpt_names() -> tuple[str, ...]:
    """Published GPTs."""
    return tuple(_PUBLISHED)


def published_gpt(name: str) -> ModelShape:
    """The published GPT of that name."""
    layers, hidden, heads, vocabulary, source = _PUBLISHED[name]
    positions = 1024 if name.startswith("gpt2") else 2048
    return gpt(
        name, layers, hidden, heads, vocabulary=vocabulary, positions=positions, source=source
    )

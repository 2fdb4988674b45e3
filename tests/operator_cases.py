"""Every public operator of the kernels as a module with parameters and one input, to be wrapped."""

from __future__ import annotations

# N tokens, D hidden, H query heads, K key/value heads, E head_dim, F width, V vocabulary, X experts
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.kernels import dispatch
from fivefold.kernels.cross_entropy import linear_cross_entropy
from fivefold.kernels.flash_attention import flash_attention
from fivefold.kernels.gated import gated
from fivefold.kernels.gated_linear import gated_linear
from fivefold.kernels.grouped_linear import grouped_linear
from fivefold.kernels.linear import linear
from fivefold.kernels.log_probs import linear_log_probs
from fivefold.kernels.multiply import multiply
from fivefold.kernels.normed_linear import Recipe, normed_linear
from fivefold.kernels.rms_norm import rms_norm, rms_norm_residual
from fivefold.kernels.rope import apply_rope

D, H, K, E, F, V, X = 24, 4, 2, 6, 40, 53, 4
CHUNK = 5  # tokens whose logits exist at a time: several chunks, the last one short
EPS = 1e-6
OPERATORS = {
    "fivefold::multiply", "fivefold::grouped_multiply", "fivefold::flash_attention",
    "fivefold::linear_cross_entropy", "fivefold::linear_log_probs", "fivefold::rms_norm",
    "fivefold::rms_norm_residual", "fivefold::rotate", "fivefold::gated",
    "fivefold::gated_linear", "fivefold::normed_linear",
}  # fmt: skip


class Attend(nn.Module):
    """Norm, products, rotation and attention over documents, then a norm with the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.next_norm = (nn.Parameter(torch.empty(D)) for _ in range(2))
        self.inward = nn.Parameter(torch.empty((H + 2 * K) * E, D))
        self.bias = nn.Parameter(torch.empty((H + 2 * K) * E))
        self.outward = nn.Parameter(torch.empty(D, H * E))

    def forward(self, x: Tensor, starts: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        """[N,D], [S+1] int32 and [N,E/2] to (norm of the sum [N,D], the sum [N,D])."""
        recipe = Recipe(x, self.norm, EPS, 0.0)
        normed = rms_norm(x, self.norm, EPS)
        heads = normed_linear(normed, self.inward, self.bias, recipe).unflatten(-1, (-1, E))
        turned = apply_rope(heads[:, : H + K].unsqueeze(0), angles.cos()[None], angles.sin()[None])
        attended, _ = flash_attention(
            turned[0, :, :H], turned[0, :, H:], heads[:, H + K :], starts, starts,
            causal=True, scale=E**-0.5, window=7, softcap=20.0,
        )  # fmt: skip
        added = linear(attended.flatten(1), self.outward)
        return rms_norm_residual(added, x, self.next_norm, EPS, 1.0)


class Feed(nn.Module):
    """A gated layer by `multiply`, and the same rows by experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(2 * F, D))
        self.down = nn.Parameter(torch.empty(D, F))
        self.experts = nn.Parameter(torch.empty(X, D, D))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """[N,D] and rows of each expert [X] to [N,D]."""
        gate, up = multiply(x, self.gate_up.mT).chunk(2, dim=-1)  # strided halves
        wide = gated(gate, up, "gelu_tanh")
        fed = gated_linear(gate, up, self.down, None, "silu") + linear(wide, self.down)
        return fed + grouped_linear(x, self.experts, counts)


class Judge(nn.Module):
    """Loss, log-probabilities and entropies of a head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Parameter(torch.empty(V, D))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """[N,D] and [N] to a scalar."""
        loss = linear_cross_entropy(x, self.head, labels, z_loss=1e-3, chunk=CHUNK)
        found, entropies = linear_log_probs(x, self.head, labels, softcap=15.0, chunk=CHUNK)
        return loss - 0.1 * found.sum() - 0.01 * entropies.square().sum()


class Everything(nn.Module):
    """All of `OPERATORS`, in three modules to wrap."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.feed, self.judge = Attend(), Feed(), Judge()

    def forward(
        self, x: Tensor, starts: Tensor, angles: Tensor, counts: Tensor, labels: Tensor
    ) -> Tensor:
        """What `inputs` gives, to a scalar in fp32."""
        normal, total = self.attend(x, starts, angles)
        return self.judge(total + self.feed(normal, counts), labels)


def everything(dtype: torch.dtype) -> Everything:
    """The same parameters each time, real or fake."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = Everything()
    finally:
        torch.set_default_dtype(before)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return model


def inputs(dtype: torch.dtype, seed: int = 0, tokens: int = 19) -> tuple[Tensor, ...]:
    """Tokens of three documents, one of them empty; experts of which one has no row."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, D, generator=generator).to(dtype)
    labels = torch.randint(0, V, (tokens,), generator=generator)
    labels[::6] = -100
    starts = torch.tensor([0, 8, 8, tokens], dtype=torch.int32)
    angles = torch.randn(tokens, E // 2, generator=generator)
    counts = torch.tensor([5, 0, 4, tokens - 9])
    return x, starts, angles, counts, labels


def results(model: nn.Module, given: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The loss, and gradients of the input and of each parameter."""
    x = given[0].detach().clone().requires_grad_()
    for parameter in model.parameters():
        parameter.grad = None
    loss = model(x, *given[1:])
    loss.backward()
    found: dict[str, Any] = {"loss": loss.detach(), "x": x.grad}
    for name, parameter in model.named_parameters():
        plain = name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
        found[plain] = parameter.grad
    return found


@contextmanager
def deterministic() -> Iterator[None]:
    """Our own operators throughout, in fp32 too."""
    with dispatch.deterministic():
        yield


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal in every element and name."""
    assert actual.keys() == expected.keys()
    strange = [name for name in expected if not torch.equal(actual[name], expected[name])]
    assert not strange, f"other bits in {strange}"

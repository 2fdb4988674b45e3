"""Rotary position embedding (Su et al. 2021) with every context-extension scaling.

Sources: linear (Chen et al. 2023), dynamic NTK (bloc97 2023), YaRN (Peng et al. 2023), llama3
(Dubey et al. 2024, as published with the Llama 3.1 weights).
"""

from __future__ import annotations

# B batch, S sequence, H heads, E head_dim, F = E/2 frequencies
import math
from typing import Any, Protocol

import torch
from torch import Tensor

from fivefold.kernels import dispatch, operator
from fivefold.kernels.cpu import rope as native


class Scaling(Protocol):
    """What this module needs to know; `model.config.RopeConfig` is one."""

    @property
    def theta(self) -> float:
        """Base of the periods."""

    @property
    def kind(self) -> str:
        """default, linear, dynamic, llama3 or yarn."""

    @property
    def factor(self) -> float:
        """Context length over the original one."""

    @property
    def original_positions(self) -> int | None:
        """Context length before scaling; None: the model's."""

    @property
    def low_freq_factor(self) -> float:
        """llama3."""

    @property
    def high_freq_factor(self) -> float:
        """llama3."""

    @property
    def beta_fast(self) -> float:
        """yarn."""

    @property
    def beta_slow(self) -> float:
        """yarn."""

    @property
    def attention_factor(self) -> float | None:
        """yarn: scale of cos and sin; None: 0.1 ln(factor) + 1."""

    @property
    def truncate(self) -> bool:
        """yarn: round the correction range to whole dims."""


def rope_tables(
    positions: Tensor, scaling: Scaling, head_dim: int, max_positions: int
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B,S,F] in fp32 for integer `positions` [B,S].

    `max_positions` is the model's context length, from which `dynamic` starts to stretch.
    """
    with torch.no_grad():
        frequencies, amplitude = inverse_frequencies(positions, scaling, head_dim, max_positions)
        angles = positions.float().unsqueeze(-1) * frequencies
        return angles.cos() * amplitude, angles.sin() * amplitude


def inverse_frequencies(
    positions: Tensor, scaling: Scaling, head_dim: int, max_positions: int
) -> tuple[Tensor, float]:
    """Radians per position [F], and the factor on cos and sin (YaRN's; 1 otherwise)."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    periods = scaling.theta**exponents
    original = scaling.original_positions or max_positions
    match scaling.kind:
        case "default":
            return 1.0 / periods, 1.0
        case "linear":
            return 1.0 / periods / scaling.factor, 1.0
        case "dynamic":
            theta = _dynamic_theta(positions, scaling, head_dim, max_positions)
            return 1.0 / theta**exponents, 1.0
        case "llama3":
            return _llama3(1.0 / periods, scaling, original), 1.0
        case "yarn":
            amplitude = scaling.attention_factor
            if amplitude is None:
                amplitude = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
            return _yarn(periods, scaling, head_dim, original), amplitude
    raise ValueError(f"unknown rope scaling {scaling.kind!r}")


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of each head of x [B,S,H,E] by the angles of its position [B or 1,S,F].

    Computed in fp32 (fp64 for fp64 inputs) and rounded once. Raises `KernelError` for tables of
    other positions or dims.
    """
    return _turn(x, cos, sin, False)


def apply_rope_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same as complex multiplication: (first + i second) e^(i angle)."""
    first, second = x.double().chunk(2, dim=-1)
    turn = torch.complex(cos.double(), sin.double()).unsqueeze(2)
    turned = torch.complex(first, second) * turn
    return torch.cat((turned.real, turned.imag), dim=-1).to(x.dtype)


def _dynamic_theta(
    positions: Tensor, scaling: Scaling, head_dim: int, max_positions: int
) -> Tensor:
    """A base that grows with the longest row once that is beyond the context length."""
    length = (positions.max() + 1).clamp(min=max_positions).float()
    stretch = scaling.factor * length / max_positions - (scaling.factor - 1)
    return scaling.theta * stretch ** (head_dim / (head_dim - 2))


def _llama3(frequencies: Tensor, scaling: Scaling, original: int) -> Tensor:
    """Slow down long wavelengths by `factor`, leave short ones, blend those between."""
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    slowed = torch.where(wavelengths > original / low, frequencies / scaling.factor, blended)
    return torch.where(wavelengths < original / high, frequencies, slowed)


def _yarn(periods: Tensor, scaling: Scaling, head_dim: int, original: int) -> Tensor:
    """Interpolate dims that turn less than beta_slow times over the original context."""

    def dim_that_turns(rotations: float) -> float:
        ratio = original / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(scaling.theta))

    low, high = dim_that_turns(scaling.beta_fast), dim_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    dims = torch.arange(head_dim // 2, device=periods.device).float()
    interpolated = ((dims - low) / (high - low)).clamp(0, 1)
    return interpolated / (scaling.factor * periods) + (1 - interpolated) / periods


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    native.check_tables(x, cos, sin)
    match dispatch.choose("rope", x.device.type, x.dtype).implementation:
        case "native":
            return native.rotate(x, cos, sin, back)
        case "triton":
            from fivefold.kernels.triton import rope as gpu

            return gpu.rotate(x, cos, -sin if back else sin)
    cos, sin = cos.unsqueeze(2), (-sin if back else sin).unsqueeze(2)
    first, second = (x if x.dtype == torch.float64 else x.float()).chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype).contiguous()


_turn = operator.define(
    "rotate(Tensor x, Tensor cos, Tensor sin, bool back) -> Tensor",
    _rotate,
    lambda x, cos, sin, back: x.new_empty(x.shape),
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.back = inputs
    ctx.save_for_backward(cos, sin)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Linear in x, so backward turns the other way and keeps only the tables."""
    return _turn(grad, *ctx.saved_tensors, not ctx.back), None, None, None


operator.differentiate("rotate", _differentiate, _keep)

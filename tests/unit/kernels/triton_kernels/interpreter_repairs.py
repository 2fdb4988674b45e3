"""What Triton 3.7.1's interpreter does that no GPU does, put right.

It keeps bf16 numbers as 16-bit integers. `tl.dot` multiplies these integers; a cast from fp32 cuts
the last bits off, or, where it rounds, loses the carry into the exponent; one from integers keeps
the integer's bits. And it leaves the product of fp32 matrices to a BLAS in which a row's bits depend
on where in the matrix the row lies; in a tensor core's they do not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def widened(bits: np.ndarray) -> np.ndarray:
    """bf16 numbers kept as uint16, as fp32: the upper half of the bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrowed(numbers: np.ndarray) -> np.ndarray:
    """fp32 numbers rounded to the nearest bf16, ties to even, kept as uint16."""
    tensor = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.float32))
    return tensor.bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(numbers.shape)


def repair() -> None:
    """Replaces the interpreter's casts between fp32 and bf16, and its product of matrices."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain_cast = InterpreterBuilder.cast_impl

    def cast(self: Any, source: Any, target: Any, *_: Any) -> Any:
        kinds = source.dtype.scalar, target.scalar
        if kinds == (tl.bfloat16, tl.float32):
            return TensorHandle(widened(source.data), tl.float32)
        if kinds == (tl.float32, tl.bfloat16):
            return TensorHandle(narrowed(source.data), tl.bfloat16)
        if kinds[1] == tl.bfloat16 and kinds[0].is_int():
            return TensorHandle(narrowed(source.data), tl.bfloat16)
        return plain_cast(self, source, target)

    def dot(self: Any, a: Any, b: Any, total: Any, *_: Any) -> Any:
        left, right = (
            widened(x.data) if x.dtype.scalar == tl.bfloat16 else x.data.astype(np.float32)
            for x in (a, b)
        )
        product = np.einsum("mk,kn->mn", np.ascontiguousarray(left), np.ascontiguousarray(right))
        return TensorHandle(product + total.data, total.dtype.scalar)

    InterpreterBuilder.cast_impl = cast
    InterpreterBuilder.create_fp_to_fp = cast
    InterpreterBuilder.create_dot = dot

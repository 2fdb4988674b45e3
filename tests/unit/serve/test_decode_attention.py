from __future__ import annotations

import pytest
import torch

from fivefold.kernels.decode_attention import decode_attention, decode_attention_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (8, 1)])
def test_equals_the_plain_reference(
    dtype: torch.dtype, softcap: float | None, masked: bool, heads: int, kv_heads: int
) -> None:
    rng = torch.Generator().manual_seed(0)
    query = torch.randn(3, heads, 16, generator=rng).to(dtype)
    key, value = (torch.randn(3, 21, kv_heads, 16, generator=rng).to(dtype) for _ in range(2))
    mask = torch.arange(21) < torch.tensor([[5], [21], [1]]) if masked else None
    given = {"mask": mask, "scale": 0.3, "softcap": softcap}
    fast = decode_attention(query, key, value, **given)  # type: ignore[arg-type]
    slow = decode_attention_reference(query, key, value, **given)  # type: ignore[arg-type]
    # bf16: the fused kernel rounds the softmax weights to bf16 (relative 2**-8) before the product
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(fast, slow, rtol=tolerance, atol=tolerance)

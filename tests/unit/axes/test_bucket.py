"""Buckets divide parameters as torch.chunk does, and lose nothing."""

from __future__ import annotations

# R ranks, Z elements of one rank's part of a bucket
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fivefold.axes.dp.bucket import Bucket, make_buckets, rows_of, shard_of

SHAPES = st.lists(
    st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6
)
FEW = settings(deadline=None, derandomize=True, max_examples=80)


def parameters_of(shapes: list[tuple[int, ...]]) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{i}", nn.Parameter(torch.randn(shape))) for i, shape in enumerate(shapes)]


@FEW
@given(rows=st.integers(1, 40), ranks=st.integers(1, 12))
def test_rows_are_divided_as_torch_divides(rows: int, ranks: int) -> None:
    tensor = torch.arange(rows * 2).view(rows, 2)
    chunks = [*tensor.chunk(ranks), *[tensor[:0]] * ranks][:ranks]
    for rank, chunk in enumerate(chunks):
        assert rows_of(tensor, rank, ranks) == chunk.shape[0]
        assert torch.equal(shard_of(tensor, rank, ranks), chunk)


@FEW
@given(shapes=SHAPES, ranks=st.integers(1, 5))
def test_what_each_rank_lays_out_comes_together_again(
    shapes: list[tuple[int, ...]], ranks: int
) -> None:
    named = parameters_of(shapes)
    (bucket,) = make_buckets(named, 2**30)
    size = bucket.shard_size(ranks)
    flat = torch.full((size * ranks,), float("nan"))
    for rank, part in enumerate(flat.chunk(ranks)):
        for view, parameter in zip(
            bucket.shard_views(part, rank, ranks), bucket.parameters, strict=True
        ):
            view.copy_(shard_of(parameter.detach(), rank, ranks))
    again = [torch.empty_like(p) for p in bucket.parameters]
    for rank, part in enumerate(flat.chunk(ranks)):
        for view, tensor in zip(bucket.shard_views(part, rank, ranks), again, strict=True):
            shard_of(tensor, rank, ranks).copy_(view)
    assert all(torch.equal(a, p) for a, p in zip(again, bucket.parameters, strict=True))


@FEW
@given(shapes=SHAPES, bucket_bytes=st.integers(1, 400))
def test_buckets_hold_all_parameters_last_first(
    shapes: list[tuple[int, ...]], bucket_bytes: int
) -> None:
    named = parameters_of(shapes)
    buckets = make_buckets(named, bucket_bytes)
    assert [name for b in buckets for name in b.names] == [name for name, _ in reversed(named)]
    for bucket in buckets:
        # Full when the last one came in, not before.
        assert (bucket.numel - bucket.parameters[-1].numel()) * 4 < bucket_bytes
    for bucket in buckets[:-1]:
        assert bucket.numel * 4 >= bucket_bytes


def test_views_cover_the_flat_buffer() -> None:
    parameters = (nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4)))
    bucket = Bucket(("a", "b"), parameters)
    flat = torch.arange(10.0)
    first, second = bucket.views(flat)
    assert first.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert second.tolist() == [6, 7, 8, 9]
    first.zero_()
    assert flat[:6].sum() == 0

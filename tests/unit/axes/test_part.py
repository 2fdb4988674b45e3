"""Boxes of tensors: cut, counted, and found again."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.axes.part import Part, Slice


def test_a_plain_tensor_is_a_whole_that_all_ranks_hold() -> None:
    value = torch.randn(3, 2)
    part = Part.of(value, 2, 4)
    assert part.values.data_ptr() == value.data_ptr()
    assert (part.slice.copy, part.slice.copies, part.slice.numel) == (2, 4, 6)
    assert part.like(torch.zeros(3, 2)).slice is part.slice


@settings(deadline=None, derandomize=True, max_examples=50)
@given(rows=st.integers(1, 9), columns=st.integers(1, 9), ways=st.integers(1, 4), data=st.data())
def test_boxes_of_boxes_lie_where_the_values_do(
    rows: int, columns: int, ways: int, data: st.DataObject
) -> None:
    whole = torch.arange(rows * columns).view(rows, columns)
    place, values = Slice.of(whole), whole
    for dim in data.draw(st.lists(st.integers(0, 1), max_size=3)):
        start = data.draw(st.integers(0, values.shape[dim]))
        size = data.draw(st.integers(0, values.shape[dim] - start))
        place, values = place.narrow(dim, start, size), values.narrow(dim, start, size)
    assert torch.equal(place.cut(whole), values)
    assert place.numel == values.numel()
    copied = {place.copied(a, ways).copied(b, 3).copy for a in range(ways) for b in range(3)}
    assert copied == set(range(3 * ways))

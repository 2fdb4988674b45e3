"""What a layout means to an engine, and layouts that cannot be served."""

from __future__ import annotations

from fivefold.core.errors import LayoutError
from fivefold.core.layout import Layout

SERVED = ("tp", "pp", "ep", "dp_replicate", "stage_layers", "order")


def read_layout(text: str) -> Layout:
    """The layout of a server. Raises LayoutError for parts that only training has."""
    layout = Layout.parse(text)
    for name, field in Layout.model_fields.items():
        value = getattr(layout, name)
        if name not in SERVED and value != field.default:
            raise LayoutError(
                f"layout {name}={str(value).lower()} is not served",
                f"use {', '.join(SERVED[:4])} (stage_layers, order)",
            )
    return layout


def engine_layout(layout: Layout) -> Layout:
    """Of one engine: its copies are other engines, and experts without tensor ranks to be placed
    on have ranks of their own, which hold the rest of the model whole.

    Raises LayoutError where `tp` and `ep` do not fit each other.
    """
    tp, ep = layout.tp, layout.ep
    if tp % ep and ep % tp:
        raise LayoutError(f"layout tp={tp},ep={ep}: neither divides the other", f"use ep={tp}")
    return layout.model_copy(update={"dp_replicate": 1, "dp_shard": max(1, ep // tp), "zero": 1})


def layout_of_one(text: str) -> Layout:
    """The layout of an engine without copies. Raises LayoutError."""
    layout = read_layout(text)
    if layout.dp_replicate > 1:
        raise LayoutError(
            f"layout dp_replicate={layout.dp_replicate} is copies of an engine, and this is one",
            "use fivefold serve, which has a router before them",
        )
    return engine_layout(layout)

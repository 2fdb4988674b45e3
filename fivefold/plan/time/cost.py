"""Seconds of one pass, by what they are spent on."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Cost:
    """products, attention, elementwise: of kernels. operators: how many the host starts.

    tensor, context, experts: communication that is waited for. hidden: what runs beside.
    """

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    experts: float = 0.0
    hidden_tensor: float = 0.0
    hidden_context: float = 0.0
    hidden_experts: float = 0.0
    host: float = 0.0
    operators: float = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(self.values(), other.values(), strict=True)))

    def __mul__(self, times: float) -> Cost:
        """So many of these in turn."""
        return Cost(*(a * times for a in self.values()))

    def values(self) -> tuple[float, ...]:
        """All fields in order."""
        return tuple(getattr(self, name) for name in NAMES)

    @property
    def kernels(self) -> float:
        """Seconds of computation."""
        return self.products + self.attention + self.elementwise

    @property
    def exposed(self) -> float:
        """Seconds of communication that is waited for."""
        return self.tensor + self.context + self.experts

    @property
    def seconds(self) -> float:
        """All that passes one after the other."""
        return self.kernels + self.exposed + self.host

    def started(self, dispatch: float) -> Cost:
        """With `host`: what the device waits while the host starts its operators one by one.

        Ranks meet in collectives, so that the host gets no further ahead during them.
        """
        return self + Cost(host=max(0.0, self.operators * dispatch - self.kernels))


NAMES = tuple(field.name for field in fields(Cost))

"""How bytes get from one device to another."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """What one device has of it: bytes per second in one direction, seconds a message.

    `efficiency` is the share of `bandwidth` that large collectives reach. `start`: seconds before the
    first message of a collective (its kernel, the ranks meeting), whatever their number. `multicast`:
    switches hand one message to all ranks and add up theirs (NVLink SHARP), so that there is no ring.
    """

    name: str
    bandwidth: float
    latency: float
    efficiency: float = 0.8
    source: str = ""
    start: float = 0.0
    multicast: bool = False

    @property
    def rate(self) -> float:
        """Bytes per second that large messages reach."""
        return self.bandwidth * self.efficiency

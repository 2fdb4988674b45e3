"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018)."""

from __future__ import annotations

from typing import Any

GROWTH, BACKOFF = 2.0, 0.5
GROWTH_INTERVAL = 2000  # steps without overflow before the scale grows
SMALLEST, LARGEST = 1.0, 2.0**24


class DynamicLossScaler:
    """The factor on the loss: halved when a gradient overflows, doubled after a long calm."""

    def __init__(self, scale: float, growth_interval: int = GROWTH_INTERVAL) -> None:
        self.scale = scale
        self.growth_interval = growth_interval
        self.calm = 0

    def update(self, overflow: bool) -> None:
        """Adjust after a step. A step that overflowed must not have updated anything."""
        if overflow:
            self.scale = max(self.scale * BACKOFF, SMALLEST)
            self.calm = 0
            return
        self.calm += 1
        if self.calm == self.growth_interval:
            self.scale = min(self.scale * GROWTH, LARGEST)
            self.calm = 0

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"scale": self.scale, "calm": self.calm}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's state."""
        self.scale, self.calm = float(state["scale"]), int(state["calm"])

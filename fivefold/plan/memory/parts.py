"""A ledger as a few parts of one bar, in one order and one colour each wherever it is drawn."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.plan.memory.ledger import Ledger


@dataclass(frozen=True)
class Part:
    """What a part is called; its letter in a terminal, and its colour in a picture."""

    name: str
    letter: str
    colour: str
    meaning: str


PARTS = (
    Part("parameters", "P", "#4878a8", "what forward computes with"),
    Part("masters", "M", "#7ba6c9", "fp32 parameters beside them"),
    Part("gradients", "G", "#e49444", "when all are reduced"),
    Part("optimizer", "O", "#d1605e", "moments"),
    Part("activations", "a", "#6a9f58", "at the fullest moment"),
    Part("buffers", "b", "#a87c9f", "gathered parameters, messages, gradients on their way"),
    Part("reserve", "r", "#967662", "context, workspaces, fragments (an estimate)"),
)


def sizes(ledger: Ledger) -> dict[str, int]:
    """Bytes of each part, in the order of PARTS."""
    return {
        "parameters": ledger.parameters,
        "masters": ledger.masters,
        "gradients": ledger.gradients,
        "optimizer": ledger.optimizer,
        "activations": sum(ledger.activations.values()),
        "buffers": sum(ledger.buffers.values()),
        "reserve": ledger.reserve,
    }


def as_dict(ledger: Ledger) -> dict[str, object]:
    """For JSON: every number in bytes."""
    return {
        "rank": ledger.rank,
        "moment": ledger.moment,
        "bytes": sizes(ledger),
        "states": ledger.states,
        "total": ledger.total,
        "host": ledger.host,
        "activations": dict(ledger.activations),
        "buffers": dict(ledger.buffers),
    }

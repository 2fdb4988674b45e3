"""The loss scale backs off at overflow, grows after a calm, stays within its limits."""

from __future__ import annotations

import json

from fivefold.precision.loss_scaler import LARGEST, SMALLEST, DynamicLossScaler


def test_overflow_halves_and_restarts_the_calm() -> None:
    scaler = DynamicLossScaler(1024.0, growth_interval=3)
    scaler.update(overflow=False)
    scaler.update(overflow=False)
    scaler.update(overflow=True)
    assert scaler.scale == 512.0
    scaler.update(overflow=False)
    scaler.update(overflow=False)
    assert scaler.scale == 512.0
    scaler.update(overflow=False)
    assert scaler.scale == 1024.0


def test_it_stays_within_its_limits() -> None:
    scaler = DynamicLossScaler(2.0, growth_interval=1)
    for _ in range(5):
        scaler.update(overflow=True)
    assert scaler.scale == SMALLEST
    for _ in range(60):
        scaler.update(overflow=False)
    assert scaler.scale == LARGEST


def test_state_survives_json() -> None:
    scaler = DynamicLossScaler(4096.0, growth_interval=4)
    for overflow in (False, True, False, False, False):
        scaler.update(overflow)
    other = DynamicLossScaler(1.0, growth_interval=4)
    other.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    for each in (scaler, other):
        each.update(overflow=False)
    assert (other.scale, other.calm) == (scaler.scale, scaler.calm) == (4096.0, 0)

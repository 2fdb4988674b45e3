"""How long a training step takes, and on what the time goes."""

from fivefold.plan.time.result import StepTime
from fivefold.plan.time.simulated import simulated_step
from fivefold.plan.time.step import step_time

__all__ = ["StepTime", "simulated_step", "step_time"]

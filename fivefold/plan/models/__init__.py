"""Models to plan for: by file, by name of a published one, or by size."""

from fivefold.plan.models.count import Parameters, layer_parameters, outer_parameters, parameters
from fivefold.plan.models.parse import shape

__all__ = ["Parameters", "layer_parameters", "outer_parameters", "parameters", "shape"]

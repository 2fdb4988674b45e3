"""The pipeline axis: schedules as data, their simulation and drawing, and the runtime."""

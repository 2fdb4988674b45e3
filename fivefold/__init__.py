"""fivefold: one model definition, planned, trained, aligned, compressed and served on five axes."""

__version__ = "0.1.0"

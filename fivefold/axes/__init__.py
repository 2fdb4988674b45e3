"""WHERE a model runs. `apply` is the one place that fixes the order of composition."""

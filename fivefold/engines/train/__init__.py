"""Training: the loop, the step, the optimizer, checkpoints, data and their launch."""

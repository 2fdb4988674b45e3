"""The decoder, as plain PyTorch that knows nothing of ranks, caches or losses."""

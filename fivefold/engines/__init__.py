"""The three engines: train, serve, align."""

"""A training step of one rank without its machines: bytes held, and bytes moved."""

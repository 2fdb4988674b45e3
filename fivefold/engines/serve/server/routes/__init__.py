"""One module a family of endpoints."""

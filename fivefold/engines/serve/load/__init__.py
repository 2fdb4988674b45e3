"""Load on an OpenAI-compatible server, and what it took. Imports no torch."""

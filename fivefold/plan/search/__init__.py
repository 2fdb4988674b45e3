"""All layouts that can run, and which of them are worth running."""

"""The HTTP server: OpenAI's endpoints over engines in processes of their own. No torch in here
but in `engine_process.py` and `embedding.py`, which run on the engine's side.
"""

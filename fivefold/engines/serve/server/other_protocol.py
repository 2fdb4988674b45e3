"""Bodies of the endpoints that generate nothing."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from fivefold.engines.serve.server.chat_protocol import Message
from fivefold.engines.serve.server.protocol import Body, Prompts


class EmbeddingRequest(Body):
    """POST /v1/embeddings."""

    model: str
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None
    pooling: Literal["mean", "last"] | None = None
    """Mean over the tokens (the default), or the last one's."""
    normalize: bool | None = None
    """To length 1, unless false."""

    def texts_or_ids(self) -> list[str] | list[list[int]]:
        """The inputs, one by one."""
        given: Any = self.input
        if isinstance(given, str) or not given or isinstance(given[0], int):
            return [given]
        return given


class TokenizeRequest(Body):
    """POST /tokenize: a prompt, or messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool | None = None

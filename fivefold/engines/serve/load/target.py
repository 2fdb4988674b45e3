"""The server under load: its address, its model, and the bodies that are sent to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from fivefold.core.errors import nearest
from fivefold.engines.serve.load.errors import LoadError
from fivefold.engines.serve.load.material import Prompt

Endpoint = Literal["completions", "chat"]
PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True)
class Target:
    """Where requests go and what all of them have in common."""

    base: str
    model: str
    endpoint: Endpoint = "completions"
    temperature: float = 0.0
    ignore_eos: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of each body; they win over ours."""

    @property
    def address(self) -> str:
        """Where requests are posted."""
        return self.base + PATHS[self.endpoint]

    def body(self, prompt: Prompt, output_tokens: int) -> bytes:
        """A request for a streamed answer that ends with its usage."""
        asked: dict[str, Any] = {"model": self.model, "max_tokens": output_tokens}
        if self.endpoint == "chat":
            asked["messages"] = [{"role": "user", "content": prompt}]
        else:
            asked["prompt"] = prompt
        asked |= {"temperature": self.temperature, "stream": True}
        asked["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            asked["ignore_eos"] = True  # no field of OpenAI's; vLLM, SGLang and fivefold have it
        return json.dumps(asked | dict(self.extra)).encode()


def headers(api_key: str | None) -> dict[str, str]:
    """What each request carries."""
    found = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    if api_key:
        found["Authorization"] = f"Bearer {api_key}"
    return found


def base_of(url: str) -> str:
    """`http://host:port` of what a user gives, with or without /v1. Raises LoadError."""
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fine = False
    if not fine:
        raise LoadError(f"{url!r} is no address of a server", "write --url http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def chosen_model(listed: list[str], wanted: str | None, base: str) -> str:
    """The wanted one of the server's models, or its first. Raises LoadError with the nearest."""
    if wanted is None:
        if not listed:
            raise LoadError(f"{base} lists no model", "name one with --model")
        return listed[0]
    if listed and wanted not in listed:
        raise LoadError(f"{base} serves no model {wanted!r}", nearest(wanted, listed))
    return wanted

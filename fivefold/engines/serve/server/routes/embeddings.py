"""POST /v1/embeddings: pooled hidden states of the decoder."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from fivefold.engines.serve.server.api_errors import JSON, unsupported
from fivefold.engines.serve.server.keys import Caller
from fivefold.engines.serve.server.other_protocol import EmbeddingRequest
from fivefold.engines.serve.server.routes.access import Admitted, Served
from fivefold.engines.serve.server.service import Service
from fivefold.engines.serve.server.sse import while_connected

router = APIRouter()


@router.post("/v1/embeddings", response_class=JSON)
async def create_embedding(
    request: Request, body: EmbeddingRequest, service: Served, caller: Admitted
) -> Response:
    """Vectors for texts."""
    service.check_model(body.model)
    size = service.facts.hidden_size
    if body.dimensions not in (None, size):
        raise unsupported("dimensions", f"the model's vectors have {size} and cannot be cut")
    return JSON(await while_connected(request.receive, _answer(body, service, caller)))


async def _answer(body: EmbeddingRequest, service: Service, caller: Caller) -> dict[str, Any]:
    prompts = [await service.encode(given, "input") for given in body.texts_or_ids()]
    data, tokens = [], 0
    for index, prompt in enumerate(prompts):
        # one at a time: others' tokens are computed in between, and nothing runs on when
        # the client leaves
        vector = await service.pool.least_busy().embed(prompt, body.pooling or "mean")
        caller.charge(len(prompt))
        tokens += len(prompt)
        if body.normalize is not False:
            vector = _normalized(vector)
        written: Any = vector if body.encoding_format != "base64" else _base64(vector)
        data.append({"object": "embedding", "index": index, "embedding": written})
    counts = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": service.names[0], "usage": counts}


def _normalized(vector: list[float]) -> list[float]:
    length = math.sqrt(math.fsum(x * x for x in vector))
    return [x / length for x in vector] if length > 0 else vector


def _base64(vector: list[float]) -> str:
    """Little-endian fp32, as OpenAI writes them."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()

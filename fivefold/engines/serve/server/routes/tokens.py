"""/tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from fivefold.engines.serve.server.api_errors import JSON, APIError
from fivefold.engines.serve.server.other_protocol import DetokenizeRequest, TokenizeRequest
from fivefold.engines.serve.server.routes.access import Known, Served

router = APIRouter()


@router.post("/tokenize", response_class=JSON)
async def tokenize(body: TokenizeRequest, service: Served, caller: Known) -> Response:
    """Token ids of a prompt, or of messages through the chat template."""
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise APIError(400, "give either prompt or messages", param="prompt")
    if body.messages is not None:
        wanted = body.add_generation_prompt is not False
        messages = [message.for_template() for message in body.messages]
        text = await service.render(messages, add_generation_prompt=wanted)
        ids = await service.encode(text, "messages", add_special=body.add_special_tokens is True)
    else:
        special = body.add_special_tokens is not False
        ids = await service.encode(body.prompt or "", "prompt", add_special=special)
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": service.facts.context,
        "tokens": ids,
    }
    if body.return_token_strs:
        answer["token_strs"] = [service.tokenizer.backend.id_to_token(id) for id in ids]
    return JSON(answer)


@router.post("/detokenize", response_class=JSON)
async def detokenize(body: DetokenizeRequest, service: Served, caller: Known) -> Response:
    """Text of token ids."""
    service.check_model(body.model)
    size = service.facts.vocab_size
    for token in body.tokens:
        if not 0 <= token < size:
            raise APIError(
                400, f"tokens has {token}, but the vocabulary has {size}", param="tokens"
            )
    skip = body.skip_special_tokens is True
    return JSON({"prompt": service.tokenizer.decode(body.tokens, skip_special=skip)})

"""/v1/models."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from fivefold.engines.serve.server.api_errors import JSON
from fivefold.engines.serve.server.routes.access import Known, Served
from fivefold.engines.serve.server.service import Service

router = APIRouter()


@router.get("/v1/models", response_class=JSON)
async def list_models(service: Served, caller: Known) -> Response:
    """The model, under each of its names."""
    return JSON({"object": "list", "data": [_card(service, name) for name in service.names]})


@router.get("/v1/models/{name:path}", response_class=JSON)
async def get_model(name: str, service: Served, caller: Known) -> Response:
    """One of them."""
    service.check_model(name)
    return JSON(_card(service, name))


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "fivefold",
        "root": service.names[0],
        "parent": None,
        "max_model_len": service.facts.context,
    }

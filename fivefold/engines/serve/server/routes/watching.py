"""/health, /ready, /metrics and /engine: for load balancers, Prometheus and the page."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from fivefold.engines.serve.server.api_errors import JSON, APIError
from fivefold.engines.serve.server.engine_client import EngineClient
from fivefold.engines.serve.server.routes.access import Served

router = APIRouter()
SUMMED = (
    "running", "waiting", "blocks", "blocks_owned", "blocks_cached", "tokens_asked",
    "tokens_hit", "preemptions", "steps",
)  # fmt: skip


@router.get("/health", response_class=JSON)
async def health(service: Served) -> Response:
    """200 while there is an engine."""
    if not service.pool.is_ready:
        return APIError(503, service.pool.why_down, code="engine_down").response()
    return JSON({"status": "ok"})


@router.get("/ready", response_class=JSON)
async def ready(service: Served) -> Response:
    """200 while new requests are taken."""
    if service.drain.draining:
        return APIError(503, "the server is stopping", code="draining").response()
    if not service.pool.is_ready:
        return APIError(503, service.pool.why_down, code="engine_down").response()
    return JSON({"status": "ready"})


@router.get("/metrics")
async def metrics(service: Served) -> Response:
    """In Prometheus's text format."""
    return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/engine", response_class=JSON)
async def engine(service: Served) -> Response:
    """What the engines are busy with now."""
    engines = [_state(client) for client in service.pool.clients]
    answer: dict[str, Any] = {name: sum(e[name] for e in engines) for name in SUMMED}
    asked = answer["tokens_asked"]
    answer |= {
        "hit_rate": answer["tokens_hit"] / asked if asked else 0.0,
        "tokens_per_second": service.metrics.tokens_per_second,
        "requests_total": service.metrics.requests_total,
        "requests_running": service.drain.running,
        "restarts": sum(e["restarts"] for e in engines),
        "ready": service.pool.is_ready and not service.drain.draining,
        "draining": service.drain.draining,
        "model": service.names[0],
        "context": service.facts.context,
        "block_size": service.facts.block_size,
        "dtype": service.facts.dtype,
        "device": service.facts.device,
        "parameters": service.facts.parameters,
        "engines": engines,
    }
    return JSON(answer)


def _state(client: EngineClient) -> dict[str, Any]:
    counts = dict.fromkeys(SUMMED, 0) if client.state is None else asdict(client.state)
    return {**counts, "ready": client.ready is not None, "restarts": client.restarts}

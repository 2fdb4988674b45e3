"""The built-in page: the files of page/, each under its name, and `/` for index.html."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import FileResponse, Response

FOLDER = Path(__file__).resolve().parents[1] / "page"
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def page_router() -> APIRouter:
    """A route for each file that is there."""
    router = APIRouter(include_in_schema=False)
    for path in sorted(FOLDER.glob("*.*")):
        _add(router, f"/{path.name}", path)
        if path.name == "index.html":
            _add(router, "/", path)
    return router


def _add(router: APIRouter, where: str, path: Path) -> None:
    async def give() -> Response:
        return FileResponse(path, headers=HEADERS)

    router.add_api_route(where, give, methods=["GET"])

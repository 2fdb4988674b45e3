"""What routes find on a request: the service, and who asks."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from fivefold.engines.serve.server.keys import Caller
from fivefold.engines.serve.server.service import Service


def service_of(request: Request) -> Service:
    """The service of this app."""
    service: Service = request.app.state.service
    return service


def known_caller(request: Request) -> Caller:
    """Who asks. Raises APIError 401."""
    return service_of(request).keys.caller(request.headers.get("authorization"))


def admitted_caller(request: Request) -> Caller:
    """Who asks for work. Raises APIError 401, or 429 beyond a limit."""
    caller = known_caller(request)
    caller.admit()
    return caller


Served = Annotated[Service, Depends(service_of)]
Known = Annotated[Caller, Depends(known_caller)]
Admitted = Annotated[Caller, Depends(admitted_caller)]

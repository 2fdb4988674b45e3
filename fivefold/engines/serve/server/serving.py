"""From options to a running server, and to its end: start, signals, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import uvicorn

from fivefold.core.errors import ConfigError
from fivefold.engines.serve.server.app import make_app
from fivefold.engines.serve.server.keys import Keys
from fivefold.engines.serve.server.messages import EngineOptions, Ready
from fivefold.engines.serve.server.metrics import Metrics
from fivefold.engines.serve.server.parsers import guess_formats, make_parser
from fivefold.engines.serve.server.pool import EnginePool
from fivefold.engines.serve.server.service import Limits, Service

AUTO = "auto"
NONE = "none"
log = logging.getLogger("fivefold.serve")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What the server is told beside what its engines are."""

    host: str = "127.0.0.1"
    port: int = 8000
    names: tuple[str, ...] = ()
    """What clients call the model; none: the last part of its path."""
    keys: Path | None = None
    limits: Limits = field(default_factory=Limits)
    drain_seconds: float = 30.0
    tool_parser: str = AUTO
    reasoning_parser: str = AUTO
    replicas: int = 1
    access_log: bool = False


def run(engine: EngineOptions, options: ServerOptions, tell: Callable[[str], None]) -> None:
    """Serve until a signal. `tell` is given lines for the user. Raises FivefoldError."""
    if engine.threads is None and options.replicas > 1:
        threads = max(1, len(os.sched_getaffinity(0)) // options.replicas)
        engine = replace(engine, threads=threads)
    keys = Keys() if options.keys is None else Keys.from_file(options.keys)
    _parsers(options, None)  # a wrong name is said before the model is read
    with contextlib.closing(bind(options.host, options.port)) as listener:
        asyncio.run(_serve(engine, options, keys, listener, tell))


async def _serve(
    engine: EngineOptions,
    options: ServerOptions,
    keys: Keys,
    listener: socket.socket,
    tell: Callable[[str], None],
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    pool = EnginePool(engine, options.replicas)
    facts = await _unless(stop, pool)
    if facts is None:
        return
    try:
        service = _service(engine, options, keys, pool, facts)
        config = uvicorn.Config(
            make_app(service), lifespan="off", log_level="warning", access_log=options.access_log,
            timeout_graceful_shutdown=1, server_header=False,
        )  # fmt: skip
        if options.access_log:
            logging.getLogger("uvicorn.access").setLevel(logging.INFO)
        server = _Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        tell(_greeting(service, listener))
        await stop.wait()
        stop.clear()
        await _drain(service, options.drain_seconds, stop, tell)
        server.should_exit = True
        await serving
    finally:
        await pool.stop()


class _Server(uvicorn.Server):
    """Leaves signals alone: ours drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing."""
        yield


async def _unless(stop: asyncio.Event, pool: EnginePool) -> Ready | None:
    """What the engines say of themselves, or None when a signal came before they were ready."""
    starting, stopping = asyncio.create_task(pool.start()), asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        stopping.cancel()
        return starting.result()
    starting.cancel()  # which ends the processes
    await asyncio.gather(starting, return_exceptions=True)
    return None


def _service(
    engine: EngineOptions, options: ServerOptions, keys: Keys, pool: EnginePool, facts: Ready
) -> Service:
    names = options.names or (Path(engine.model).name,)
    tools, reasoning = _parsers(options, facts.tokenizer.chat_template)
    return Service(
        pool=pool,
        facts=facts,
        names=names,
        created=int(time.time()),
        metrics=Metrics(names[0], pool),
        keys=keys,
        limits=options.limits,
        tool_format=tools,
        reasoning_format=reasoning,
    )


def _parsers(options: ServerOptions, template: str | None) -> tuple[str | None, str | None]:
    """Formats by name, or guessed from the chat template. Raises ConfigError for unknown ones."""
    guessed = guess_formats(template)
    asked = options.tool_parser, options.reasoning_parser
    tools, reasoning = (None if name in (AUTO, NONE) else name for name in asked)
    make_parser(tools, reasoning)
    tools, reasoning = (
        guess if name == AUTO else None if name == NONE else name
        for name, guess in zip(asked, guessed, strict=True)
    )
    return tools, reasoning


async def _drain(
    service: Service, seconds: float, again: asyncio.Event, tell: Callable[[str], None]
) -> None:
    """Let running requests end; a second signal waits for nobody."""
    if service.drain.running:
        tell(f"stopping: {service.drain.running} requests may end within {seconds:g} s")
    finishing = asyncio.create_task(service.drain.finish(seconds))
    impatient = asyncio.create_task(again.wait())
    await asyncio.wait({finishing, impatient}, return_when=asyncio.FIRST_COMPLETED)
    finishing.cancel()
    impatient.cancel()
    if service.drain.running:
        tell(f"stopped with {service.drain.running} requests cut off")
    else:
        tell("stopped")


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError when the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
        listener.setblocking(False)
    except (OSError, OverflowError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"cannot listen on {host} port {port}: {why}", "choose another --host or --port"
        ) from None
    return listener


def _greeting(service: Service, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    where = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    facts = service.facts
    cached = facts.blocks * facts.block_size
    return (
        f"serving {service.names[0]} at {where} ({facts.parameters / 1e6:,.1f}M parameters, "
        f"{facts.dtype} on {facts.device}, context {facts.context:,}, cache of {cached:,} tokens, "
        f"loaded in {facts.seconds:.1f} s)"
    )

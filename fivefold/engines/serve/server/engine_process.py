"""The engine's own process: commands in between steps, one batch of replies a step.

Started by `engine_link.py` as `python -m ...engine_process DESCRIPTOR`, where the descriptor is its
end of a pair of sockets. It ends with `Stop`, or when the other end is closed.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import sys
import time
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from fivefold.core.errors import FivefoldError, PromptError, one_line
from fivefold.engines.serve.llm import LLM
from fivefold.engines.serve.paged.answers import Output
from fivefold.engines.serve.paged.engine import Engine
from fivefold.engines.serve.parallel.layout import layout_of_one
from fivefold.engines.serve.placement import FORMATS
from fivefold.engines.serve.sampling_params import SamplingParams
from fivefold.engines.serve.scheduling.errors import QueueFullError
from fivefold.engines.serve.server.embedding import pool
from fivefold.engines.serve.server.messages import (
    Abort,
    Accepted,
    Command,
    Embed,
    Embedded,
    EngineOptions,
    Failed,
    Ready,
    Refused,
    Reply,
    Stop,
    Submit,
    TokenizerRecord,
    Update,
    Updates,
)

IDLE_SECONDS = 1.0
"""After so long without work the engine checks that it holds nothing."""


class EngineProcess:
    """One engine and the connection that commands come from."""

    def __init__(self, engine: Engine, connection: Connection) -> None:
        self.engine = engine
        self.connection = connection
        self._own_ids: dict[int, int] = {}  # the server's to the engine's
        self._server_ids: dict[int, int] = {}
        self._open: dict[int, int] = {}  # answers to come, by the server's id

    def run(self) -> None:
        """Until `Stop`, or until the server is gone.

        Raises FivefoldError when the engine can run no more.
        """
        served = self.engine.served
        while self._take_commands():
            if self.engine.has_work and not self.engine.paused:
                self._send_outputs(self.engine.step())
            if served.ended is not None:
                raise served.ended

    def _take_commands(self) -> bool:
        """Everything that was said since the last step; waits when there is nothing else to do."""
        busy = self.engine.has_work and not self.engine.paused
        if not busy and not self.connection.poll(IDLE_SECONDS):
            if not self.engine.has_work:
                self.engine.check_idle()
            wait([self.connection, *self.engine.served.watched])
            self.engine.served.notice()
        while self.connection.poll(0):
            try:
                command = pickle.loads(self.connection.recv_bytes())
            except (EOFError, ConnectionResetError):
                return False
            if isinstance(command, Stop):
                return False
            self._obey(command)
        return True

    def _obey(self, command: Command) -> None:
        match command:
            case Submit():
                self._submit(command)
            case Abort(id=id):
                self._abort(id)
            case Embed():
                self._embed(command)

    def _submit(self, command: Submit) -> None:
        try:
            id = self.engine.add_request(
                command.prompt, command.params, priority=command.priority, tenant=command.tenant
            )
        except QueueFullError as error:
            self._send(Refused(command.id, "full", error.message, error.mend, error.retry_after))
            return
        except FivefoldError as error:
            kind: Any = "prompt" if isinstance(error, PromptError) else "failed"
            self._send(Refused(command.id, kind, error.message, error.mend))
            return
        self._own_ids[command.id] = id
        self._server_ids[id] = command.id
        self._open[command.id] = command.params.candidates
        self._send(Accepted(command.id))

    def _abort(self, id: int) -> None:
        own = self._own_ids.get(id)
        if own is not None:
            self.engine.abort(own)
            self._forget(id)
        self._send(Updates([], self.engine.state()))

    def _embed(self, command: Embed) -> None:
        try:
            vector = pool(self.engine.served.states(command.prompt), command.pooling)
        except (RuntimeError, MemoryError) as error:
            why = f"the engine failed: {type(error).__name__}: {one_line(error)}"
            self._send(Refused(command.id, "failed", why, ""))
            return
        self._send(Embedded(command.id, vector))

    def _send_outputs(self, outputs: list[Output]) -> None:
        updates = [self._update(output) for output in outputs]
        for update in updates:
            if update.completion is not None:
                self._open[update.id] -= 1
                if not self._open[update.id]:
                    self._forget(update.id)
        self._send(Updates(updates, self.engine.state()))

    def _update(self, output: Output) -> Update:
        delta = output.delta
        return Update(
            self._server_ids[output.request], output.index, delta.text, delta.token_id,
            delta.logprobs, output.completion,
        )  # fmt: skip

    def _forget(self, id: int) -> None:
        del self._server_ids[self._own_ids.pop(id)], self._open[id]

    def _send(self, reply: Reply) -> None:
        send(self.connection, reply)


def send(connection: Connection, reply: Reply) -> None:
    """One reply on its way."""
    connection.send_bytes(pickle.dumps(reply, pickle.HIGHEST_PROTOCOL))


def load(options: EngineOptions) -> Engine:
    """The engine that the options describe. Raises FivefoldError."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    settings = dict(options.settings)
    if settings.get("kv_dtype") is not None:
        settings["kv_dtype"] = FORMATS[settings["kv_dtype"]]
    return LLM(
        options.model,
        dtype=options.dtype,
        device=own_device(options),
        deterministic=options.deterministic,
        layout=options.layout,
        **settings,
    ).engine


def own_device(options: EngineOptions) -> str:
    """The device as asked for; of several GPUs, where none is named, a replica's first."""
    if options.device not in ("auto", "cuda") or not torch.cuda.is_available():
        return options.device
    first = options.replica * layout_of_one(options.layout).world_size
    return f"cuda:{first % torch.cuda.device_count()}"


def warm_up(engine: Engine) -> None:
    """Answer a prompt: kernels are compiled and weights packed before the first user comes."""
    engine.add_request([0, 0, 0], SamplingParams(max_new_tokens=2, ignore_eos=True))
    while engine.has_work:
        engine.step()


def describe(engine: Engine, started: float) -> Ready:
    """What the server needs to know of an engine."""
    assert engine.tokenizer is not None  # models by name bring one, or are refused
    served, state, size = engine.served, engine.state(), engine.settings.block_size
    return Ready(
        tokenizer=TokenizerRecord.of(engine.tokenizer),
        context=min(engine.preparation.context, state.blocks * size),
        beginning=_beginning(engine),
        vocab_size=served.config.vocab_size,
        hidden_size=served.config.hidden_size,
        parameters=served.parameters,
        dtype=str(served.dtype).removeprefix("torch."),
        device=str(served.device),
        block_size=size,
        blocks=state.blocks,
        max_sequences=engine.settings.max_sequences,
        seconds=time.perf_counter() - started,
        state=state,
    )


def _beginning(engine: Engine) -> int | None:
    try:
        return engine.preparation.encode([])[0]
    except PromptError:  # the model has none
        return None


def main() -> None:
    """Load, say so, and serve."""
    started = time.perf_counter()
    # A terminal's Ctrl-C reaches both processes; the server alone decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    options = pickle.loads(connection.recv_bytes())
    try:
        engine = load(options)
        warm_up(engine)
        send(connection, describe(engine, started))
        EngineProcess(engine, connection).run()
    except FivefoldError as error:
        with contextlib.suppress(OSError):
            send(connection, Failed(error.message, error.mend))
        sys.exit(1)
    except BrokenPipeError:  # the server is gone
        sys.exit(1)


if __name__ == "__main__":
    main()

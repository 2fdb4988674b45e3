"""The conversation of `fivefold generate --chat`: a prompt line, streamed answers, a memory."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fivefold.engines.serve.generate import Generator
    from fivefold.engines.serve.sampling_params import SamplingParams

HELP = "/reset begins anew, /exit or Ctrl-D leaves, Ctrl-C stops an answer"
Message = dict[str, str]


def opening(system: str | None) -> list[Message]:
    """The messages before the user's first."""
    return [] if system is None else [{"role": "system", "content": system}]


def encode_conversation(generator: Generator, messages: list[Message]) -> list[int]:
    """Token ids that ask for the next answer. Raises TokenizerError without a chat template."""
    from fivefold.core.errors import TokenizerError

    tokenizer = generator.tokenizer
    if tokenizer is None or tokenizer.chat is None:
        raise TokenizerError("the model has no chat template", "leave out --chat")
    return tokenizer.encode(tokenizer.chat.render(messages), add_special=False)


def converse(generator: Generator, params: SamplingParams, system: str | None) -> None:
    """Read lines and answer them until the end of input."""
    encode_conversation(generator, [*opening(system), {"role": "user", "content": ""}])
    conversation = Conversation(generator, params, system)
    terminal = sys.stdin.isatty()
    if terminal:
        import readline  # noqa: F401 (line editing and history for input())

        print(HELP, file=sys.stderr)
    while True:
        try:
            line = input("> ") if terminal else input()
        except EOFError:
            if terminal:
                print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print(f"\n{HELP}", file=sys.stderr)
            continue
        if line.strip() == "/exit":
            return
        if line.strip() == "/reset":
            conversation = Conversation(generator, params, system)
            print("a new conversation", file=sys.stderr)
        elif line.strip() == "/help":
            print(HELP, file=sys.stderr)
        elif line.strip():
            conversation.answer(line)


class Conversation:
    """Messages so far, and the cache of what the model has read."""

    def __init__(self, generator: Generator, params: SamplingParams, system: str | None) -> None:
        from fivefold.engines.serve.session import Session

        self.generator = generator
        self.params = params
        self.messages = opening(system)
        self.session = Session(generator)

    def answer(self, line: str) -> None:
        """Print the answer to one line as it comes. Ctrl-C keeps what was said until then."""
        from fivefold.cli.generate import describe
        from fivefold.core.errors import FivefoldError

        asked = [*self.messages, {"role": "user", "content": line}]
        try:
            deltas = self.session.stream(encode_conversation(self.generator, asked), self.params)
        except FivefoldError as error:
            # a question that does not fit ends neither the conversation nor the program
            print(f"fivefold: {error}, or /reset", file=sys.stderr)
            return
        said, last = "", None
        with _interrupt() as interrupted:
            for delta in deltas:
                said, last = said + delta.text, delta
                sys.stdout.write(delta.text)
                sys.stdout.flush()
                if interrupted:
                    break
        sys.stdout.write("\n")
        sys.stdout.flush()
        if last is not None and sys.stdin.isatty():
            print(describe(last.timings, last.finish_reason), file=sys.stderr)
        self.messages = [*asked, {"role": "assistant", "content": said}]


@contextmanager
def _interrupt() -> Iterator[list[Any]]:
    """A list that Ctrl-C makes true: a step is finished, not torn. A second Ctrl-C raises."""
    seen: list[Any] = []

    def note(number: int, frame: FrameType | None) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)

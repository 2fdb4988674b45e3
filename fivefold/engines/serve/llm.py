"""`LLM`: a model in this process, for many prompts at once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fivefold.core.errors import LayoutError, PromptError, TokenizerError, nearest
from fivefold.core.layout import Layout
from fivefold.engines.serve.completion import Completion, best
from fivefold.engines.serve.paged.answers import Output
from fivefold.engines.serve.paged.engine import Engine
from fivefold.engines.serve.paged.errors import EngineError
from fivefold.engines.serve.paged.memory import check_weights_fit
from fivefold.engines.serve.paged.served import Served
from fivefold.engines.serve.paged.settings import EngineSettings
from fivefold.engines.serve.parallel.layout import layout_of_one
from fivefold.engines.serve.placement import AUTO, find_device, find_dtype
from fivefold.engines.serve.prepare import Prompt
from fivefold.engines.serve.sampling_params import SamplingParams
from fivefold.kernels import dispatch
from fivefold.model.config import ModelConfig
from fivefold.model.decoder import Decoder
from fivefold.text.tokenizer import Tokenizer
from fivefold.weights.load import decoder_from
from fivefold.weights.open import ModelSource, open_source

Message = Mapping[str, Any]


class LLM:
    """A model by name or path (see `weights.open`), or a decoder that is there already.

    `dtype` is fp32, bf16, fp16 or auto, `device` cpu, cuda or auto. `deterministic` switches this
    process to kernels whose results do not depend on what else is computed. `layout` (tp=2, pp=2,
    ep=2 and their products) puts a model by name or path on several processes, which end with
    `close`, and with this one. What is left goes to `EngineSettings`: `kv_bytes`,
    `max_sequences`, ... Raises WeightsError, MemoryBudgetError, ConfigError, LayoutError.
    """

    def __init__(
        self,
        model: str | Decoder,
        tokenizer: Tokenizer | None = None,
        *,
        dtype: str = AUTO,
        device: str = AUTO,
        deterministic: bool = False,
        layout: str = "",
        **settings: Any,
    ) -> None:
        chosen = _settings(settings)
        ranks = layout_of_one(layout)
        with dispatch.deterministic(deterministic or dispatch.is_deterministic()):
            if isinstance(model, Decoder):
                served: Decoder | Served = _in_memory(model, ranks, layout)
            else:
                source = open_source(model)
                tokenizer = tokenizer or source.tokenizer()
                served = _read(source, ranks, dtype, device, chosen)
            self.engine = Engine(served, tokenizer, chosen)
        if deterministic:  # not where something was refused
            dispatch.set_deterministic(True)

    def close(self) -> None:
        """End the processes of a layout; nothing can be generated after that."""
        self.engine.close()

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Completion]:
        """Answers in the order of the prompts, `n` in a row for each.

        A prompt is text or token ids; `params` is one for all, or one each. `progress` shows a
        bar on a terminal. Raises PromptError for a prompt that cannot run, before any work.
        """
        asked = [prompts] if isinstance(prompts, str) else list(prompts)
        if asked and isinstance(asked[0], int):
            raise PromptError("the prompts are single token ids", "write generate([[1, 2, ...]])")
        given = SamplingParams() if params is None else params
        each = [given] * len(asked) if isinstance(given, SamplingParams) else list(given)
        if len(each) != len(asked):
            raise PromptError(
                f"{len(asked)} prompts, but {len(each)} sampling parameters",
                "give one for all, or one each",
            )
        ids = [self.engine.check_request(p, q) for p, q in zip(asked, each, strict=True)]
        return self._run(ids, each, progress)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        **variables: Any,
    ) -> list[Completion]:
        """The next answer of a conversation, or of each: lists of {"role": ..., "content": ...}.

        `variables` (tools, ...) go to the chat template. Raises TokenizerError without one.
        """
        tokenizer = self.engine.tokenizer
        if tokenizer is None or tokenizer.chat is None:
            raise TokenizerError("the model has no chat template", "use generate")
        one = bool(conversations) and isinstance(conversations[0], Mapping)
        several: Any = [conversations] if one else conversations
        texts = [tokenizer.chat.render(messages, **variables) for messages in several]
        prompts = [tokenizer.encode(text, add_special=False) for text in texts]
        return self.generate(prompts, params, progress=progress)

    def _run(
        self, prompts: list[list[int]], params: list[SamplingParams], progress: bool
    ) -> list[Completion]:
        engine = self.engine
        left = list(range(len(prompts)))[::-1]
        place_of: dict[int, int] = {}
        found: list[list[Completion]] = [[] for _ in prompts]
        try:
            with _bar(len(prompts), progress) as show:
                while left or place_of:
                    while left and len(engine.scheduler.waiting) < engine.settings.queue_limit:
                        place = left.pop()
                        place_of[engine.add_request(prompts[place], params[place])] = place
                    outputs = engine.step()
                    for output in outputs:
                        if output.completion is None or output.request not in place_of:
                            continue
                        place = place_of[output.request]
                        found[place].append(self._checked(output.completion))
                        if len(found[place]) == params[place].candidates:
                            del place_of[output.request]
                    show(len(prompts) - len(left) - len(place_of), outputs)
        finally:
            for id in place_of:  # after an error or Ctrl-C
                engine.abort(id)
        return [c for some, p in zip(found, params, strict=True) for c in _given(some, p)]

    def _checked(self, completion: Completion) -> Completion:
        if completion.finish_reason == "error":
            raise EngineError(
                f"the engine failed: {completion.stop_reason}", "see the error before this one"
            ) from self.engine.last_error
        return completion


def _in_memory(decoder: Decoder, ranks: Layout, layout: str) -> Decoder:
    if ranks.world_size > 1:
        raise LayoutError(
            f"layout {layout}: each rank reads its own part, which a decoder in memory has no file for",
            "give the model's name or path",
        )
    return decoder


def _read(
    source: ModelSource, ranks: Layout, dtype: str, device: str, settings: EngineSettings
) -> Decoder | Served:
    where = find_device(device)
    form = find_dtype(dtype, where)
    if ranks.world_size > 1:
        # What cuts weights takes a second to import.
        from fivefold.engines.serve.parallel.start import start_ranks

        return start_ranks(source, ranks, form, where, settings)
    check_weights_fit(weights_of(source.config, form), where, settings.memory_share)
    return decoder_from(source, form, where)


def weights_of(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of a model's weights in one format."""
    decoder = Decoder(config, device="meta", dtype=dtype)
    return sum(p.numel() * p.element_size() for p in decoder.parameters())


def _settings(given: dict[str, Any]) -> EngineSettings:
    try:
        return EngineSettings(**given)
    except TypeError:
        known = EngineSettings.__dataclass_fields__
        wrong = next(name for name in given if name not in known)
        raise EngineError(f"LLM has no setting {wrong}", nearest(wrong, known)) from None


def _given(found: list[Completion], params: SamplingParams) -> list[Completion]:
    if params.candidates > params.n:
        return best(found, params.n)
    return sorted(found, key=lambda completion: completion.index)


@contextmanager
def _bar(total: int, wanted: bool) -> Iterator[Any]:
    """A function that takes how many requests are done, and a step's outputs."""
    console = Console(stderr=True)
    shown = wanted and console.is_terminal
    columns = (
        TextColumn("answers"), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"), TimeRemainingColumn(),
    )  # fmt: skip
    started, tokens = time.perf_counter(), 0
    with Progress(*columns, console=console, disable=not shown) as bar:
        task = bar.add_task("answers", total=total, rate="")

        def show(done: int, outputs: Sequence[Output]) -> None:
            nonlocal tokens
            tokens += len(outputs)
            rate = tokens / max(time.perf_counter() - started, 1e-9)
            bar.update(task, completed=done, rate=f"{rate:,.0f} tokens/s")

        yield show

"""A whole session: find the model, ask a little, warm up, run each load."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from fivefold.engines.serve.load.client import Client
from fivefold.engines.serve.load.material import TokenIds, Words
from fivefold.engines.serve.load.measures import Summary, summarize
from fivefold.engines.serve.load.plan import Planned, plan, shortened, warm_up
from fivefold.engines.serve.load.probe import probe
from fivefold.engines.serve.load.run import ClosedLoop, Run, Runner, Silent, Watcher
from fivefold.engines.serve.load.settings import TRACES, LoadSettings
from fivefold.engines.serve.load.target import Target, base_of, chosen_model, headers
from fivefold.engines.serve.load.workload import Asked

WARM_UP_AT_ONCE = 8
OTHER_PROMPTS = 1_000_003
"""Added to the seed for warming up, so that no prompt of the load is known before it."""

Show = Callable[[str, int], AbstractContextManager[Watcher]]
"""(name, requests) -> what watches a run."""


@dataclass(frozen=True)
class Session:
    """What was found. `about`: what the load was, for reports."""

    about: dict[str, object]
    runs: list[Run]
    summaries: list[Summary]


def bench(settings: LoadSettings, show: Show | None = None) -> Session:
    """Run the loads one after the other. Raises LoadError when the server refuses the first request."""
    return asyncio.run(_bench(settings, plan(settings), show or _unseen))


async def _bench(settings: LoadSettings, planned: list[Planned], show: Show) -> Session:
    base = base_of(settings.url)
    runs: list[Run] = []
    async with Client(headers(settings.api_key), settings.timeout) as client:
        model = chosen_model(await client.models(base), settings.model, base)
        target = Target(
            base, model, settings.endpoint, settings.temperature, settings.ignore_eos,
            settings.extra,
        )  # fmt: skip
        material = await probe(client, target, settings.material())
        for place, each in enumerate(planned):
            seed = settings.seed + place
            await _warm_up(client, target, replace(material, seed=seed + OTHER_PROMPTS),
                           warm_up(settings, each))  # fmt: skip
            with show(each.load.name, len(each.asked)) as watcher:
                runner = Runner(client, target, replace(material, seed=seed), watcher)
                runs.append(await runner.run(each.asked, each.load, settings.duration))
            if runs[-1].interrupted:
                break
    summaries = [summarize(run, settings.limits) for run in runs]
    return Session(_about(settings, target, material), runs, summaries)


async def _warm_up(
    client: Client, target: Target, material: TokenIds | Words, asked: list[Asked]
) -> None:
    if not asked:
        return
    load = ClosedLoop(min(len(asked), WARM_UP_AT_ONCE))
    run = await Runner(client, target, material).run(asked, load)
    if run.interrupted:
        raise asyncio.CancelledError


def _unseen(name: str, requests: int) -> AbstractContextManager[Watcher]:
    return nullcontext(Silent())


def _about(settings: LoadSettings, target: Target, material: TokenIds | Words) -> dict[str, object]:
    found: dict[str, object] = {
        "model": target.model,
        "address": target.address,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "workload": _workload(settings),
        "prompts": _prompts(settings, material),
        "seed": settings.seed,
        "warm-up requests": settings.warmup,
        "temperature": settings.temperature,
        "ignore_eos": settings.ignore_eos,
    }
    if settings.extra:
        found["further fields"] = dict(settings.extra)
    return found


def _workload(settings: LoadSettings) -> str:
    if settings.workload == "file":
        return f"texts of {settings.prompts}, {settings.output_tokens} tokens out"
    if settings.workload in TRACES:
        cut, count = shortened(settings)
        scaled = f", lengths times {settings.length_scale:g}" if settings.length_scale != 1 else ""
        limited = f", {cut} of {count} cut to the limits" if cut else ""
        return f"{settings.workload} trace {settings.trace}{scaled}{limited}"
    around = f", each ± {settings.spread:.0%}" if settings.workload == "random" else ""
    text = f"{settings.input_tokens} tokens in, {settings.output_tokens} out{around}"
    if settings.shared_prefix:
        text += f"; the first {settings.shared_prefix} of {settings.prefixes} kinds"
    return text


def _prompts(settings: LoadSettings, material: TokenIds | Words) -> str:
    if settings.workload == "file":
        return "as given"
    if isinstance(material, TokenIds):
        return f"random token ids below {material.vocabulary}"
    source = "common words" if settings.text is None else f"words of {settings.text}"
    return f"{source}, {1 / material.per_token:.2f} tokens a word"

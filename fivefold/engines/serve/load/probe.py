"""Asks a server a little before the load: whether it takes such requests, and how it counts."""

from __future__ import annotations

import time
from dataclasses import replace

from fivefold.engines.serve.load.client import Client
from fivefold.engines.serve.load.errors import LoadError
from fivefold.engines.serve.load.material import Prompt, TokenIds, Words
from fivefold.engines.serve.load.outcome import Outcome
from fivefold.engines.serve.load.target import Target

SHORT, LONG = 32, 160
"""Words of the prompts that tell how many tokens a word has."""


async def probe(client: Client, target: Target, material: TokenIds | Words) -> TokenIds | Words:
    """The material, for words with what the server's own counting says about them.

    Raises LoadError with the server's words when it refuses.
    """
    if isinstance(material, TokenIds):
        await _asked(client, target, material.prompt([("probe", 0, SHORT)]))
        return material
    counts = []
    for words in (SHORT, LONG):
        prompt = material.prompt([("probe", words, words)])
        counts.append((await _asked(client, target, prompt)).prompt_tokens)
    if counts[0] is None or counts[1] is None:
        return material  # a server without usage: a word is taken for a token
    return material.calibrated((SHORT, counts[0]), (LONG, counts[1]))


async def _asked(client: Client, target: Target, prompt: Prompt) -> Outcome:
    extra = {key: value for key, value in target.extra.items() if key != "min_tokens"}
    body = replace(target, extra=extra).body(prompt, 1)
    outcome = await client.send(target, body, Outcome(-1, 0.0, 0.0, 0.0), time.perf_counter)
    if outcome.failure not in (None, "no tokens"):  # the one token may be the end of text
        raise LoadError(
            f"{target.address} failed the first request ({outcome.failure}): {outcome.detail}",
            _mend(outcome, target),
        )
    return outcome


def _mend(outcome: Outcome, target: Target) -> str:
    said = outcome.detail.lower()
    if outcome.failure in ("status 401", "status 403"):
        return "give --api-key"
    if "ignore_eos" in said:
        return "give --no-ignore-eos"
    if "vocab" in said or "token id" in said:
        return "give --vocabulary N, the size of the model's"
    if outcome.failure == "status 404":
        return "try the other --endpoint" if "model" not in said else "give --model"
    if outcome.failure in ("status 400", "status 422"):
        chat = target.endpoint == "chat"
        return "try the other --endpoint" if chat else "if it takes no ids, try --prompts-as text"
    return "see the server's log"

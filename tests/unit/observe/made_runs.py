"""Run directories as the training engine leaves them, with records of a believable run."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from fivefold.core.resolve import resolve
from fivefold.observe.metrics import MetricsWriter

TOKENS_PER_STEP = 16 * 256


def step_records(steps: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Warm-up and cosine, a power-law loss with noise, a slow first step, now and then a spike."""
    draw = random.Random(seed)
    warmup = max(1, steps // 12)
    memory = 700 * 2**20
    for step in range(1, steps + 1):
        done = step / steps
        lr = 3e-3 * (
            step / warmup if step <= warmup else 0.1 + 0.45 * (1 + math.cos(math.pi * done))
        )
        loss = 2.1 + 6.3 * (1 + 40 * done) ** -0.55 + draw.gauss(0, 0.06)
        norm = 0.5 + 2.5 * (1 + 60 * done) ** -0.6 + abs(draw.gauss(0, 0.08))
        if draw.random() < 0.004:
            loss, norm = loss + draw.random(), norm * (3 + 9 * draw.random())
        seconds = 0.52 + abs(draw.gauss(0, 0.02)) + (1.4 if step == 1 else 0)
        if step in (2, 3, steps // 2):
            memory += 90 * 2**20
        yield {
            "step": step,
            "loss": loss,
            "grad_norm": norm,
            "lr": lr,
            "tokens": step * (TOKENS_PER_STEP - 16),
            "tokens_per_second": TOKENS_PER_STEP / seconds,
            "mfu": 0.24 / seconds,
            "step_seconds": seconds,
            "memory_bytes": memory,
            "targets": TOKENS_PER_STEP - 16,
        }


def make_run(folder: Path, steps: int, *, resumed: bool = True) -> Path:
    """A finished run of the recipe `quickstart`, resumed once in the middle."""
    folder.mkdir(parents=True, exist_ok=True)
    config = resolve("quickstart", layout="dp_shard=2", sets=[f"train.steps={steps}"]).config
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    every = max(1, steps // 6)
    events = [{"event": "start", "step": 0, "layout": "dp_shard=2,zero=3"}]
    with MetricsWriter(folder, tensorboard=False) as writer:
        for row in step_records(steps):
            writer.write(row)
            if row["step"] % (2 * every) == 0 or row["step"] == steps:
                writer.write_evaluation(row["step"], row["loss"] + 0.15)
            if row["step"] % every == 0:
                events.append({"event": "checkpoint", "step": row["step"]})
            if resumed and row["step"] == 3 * every:
                events.append(
                    {"event": "resume", "step": row["step"], "layout": "dp_shard=2,zero=3"}
                )
    events.append({"event": "stop"})
    with (folder / "events.jsonl").open("w") as file:
        for index, event in enumerate(events):
            file.write(json.dumps({"time": 1_790_000_000 + 11.0 * index, **event}) + "\n")
    return folder

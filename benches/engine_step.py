"""Where a step of the engine goes: milliseconds a step, and how much of them is not native code.

    python benches/engine_step.py                       # SmolLM2-135M in bf16, 1, 16 and 32 at once
    python benches/engine_step.py --weights int8 --batch 1 --batch 16

Random prompts of 128 tokens, 64 greedy tokens each; then one prompt of 1,024. Python's share is the
time of `Engine.step` outside the two native calls, without a profiler in the way.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from fivefold import LLM, SamplingParams
from fivefold.engines.serve.paged.engine import Engine

PROMPT, ANSWER, LONG = 128, 64, 1024


class Stopwatch:
    """Seconds inside the functions that it was put around."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


def run(engine: Engine, batch: int, prompt: int, answer: int, native: Stopwatch) -> list[Any]:
    """(seconds, of these native, tokens given) of every step."""
    draw = random.Random(batch)
    params = SamplingParams(max_new_tokens=answer, ignore_eos=True)
    for _ in range(batch):
        engine.add_request([draw.randrange(100, 40_000) for _ in range(prompt)], params)
    steps = []
    while engine.has_work:
        native.seconds, start = 0.0, time.perf_counter()
        given = len(engine.step())
        steps.append((time.perf_counter() - start, native.seconds, given))
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--weights", default="own", choices=("own", "int8"))
    parser.add_argument("--batch", type=int, action="append", help="may be repeated")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    llm = LLM("smollm2", dtype=given.dtype, weights=given.weights, kv_bytes=2**28)
    engine, native = llm.engine, Stopwatch()
    runner = engine.runner
    assert engine.why_modules is None, f"no native step here: {engine.why_modules}"
    runner.lowered.states = native.around(runner.lowered.states)  # type: ignore[union-attr]
    runner.logits = native.around(runner.logits)  # type: ignore[method-assign]
    run(engine, 1, 8, 4, native)
    for batch in given.batch or [1, 16, 32]:
        steps = [s for s in run(engine, batch, PROMPT, ANSWER, native) if s[2] == batch]
        times = sorted(s[0] for s in steps)
        other = statistics.median(1 - s[1] / s[0] for s in steps)
        middle = statistics.median(times)
        print(
            f"{batch:3d} at once: {middle * 1e3:6.1f} ms a step (best {times[0] * 1e3:.1f}),"
            f" {batch / middle:6.1f} tokens/s, {other:.1%} outside native calls"
        )
    seconds = sum(s[0] for s in run(engine, 1, LONG, 1, native))
    print(f"a prompt of {LONG}: {seconds:.2f} s, {LONG / seconds:.0f} tokens/s")


if __name__ == "__main__":
    main()

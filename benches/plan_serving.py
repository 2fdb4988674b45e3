"""Predicted against measured serving.

    python benches/plan_serving.py TABLE      # published: `serving_measured.csv`
    python benches/plan_serving.py --box      # SmolLM2-135M on this machine, measured first

`--box` takes some minutes on an otherwise idle machine: it measures products, attention and memory
as `fivefold bench device` does, then steps of the engine, and holds the plan's to these.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path

from fivefold.plan.serving import published

BATCHES, PROMPT, ANSWER, LONG = (1, 4, 16, 32), 128, 64, 1024


def table(path: Path) -> None:
    """Print all rows and their means."""
    from fivefold.plan.hardware.parse import cluster
    from fivefold.plan.models.parse import shape

    found = published.compare(published.read(path), shape, cluster)
    print(f"{'row':7}{'model':34}{'on':10}{'by':8}{'TTFT':>9}{'is':>9}{'':>7}{'TPOT':>8}{'is':>8}")
    for each in found:
        case = each.case
        print(
            f"{case.id:7}{case.model[:32]:34}{case.system[:9]:10}{case.software:8}"
            f"{each.ttft * 1e3:9.0f}{case.ttft * 1e3:9.0f}{each.ttft_error:+7.0%}"
            f"{each.tpot * 1e3:8.2f}{case.tpot * 1e3:8.2f}{each.tpot_error:+7.0%}"
            f"{'' if case.is_complete else '  queued longer than an answer takes'}"
        )
    told = [each for each in found if each.case.is_complete]
    for name in ("ttft", "tpot"):
        print(
            f"mean absolute error of {name.upper()}: {published.mean_error(found, name):.1%};"
            f" of {len(told)} rows with as many requests out as the table says:"
            f" {published.mean_error(told, name):.1%}"
        )


def box(dtype: str, budget: float) -> None:
    """Measure this machine and steps of the engine on it; print both."""
    from fivefold import LLM
    from fivefold.plan.calibrate.measure import measure_device
    from fivefold.plan.hardware.measured import cluster_of
    from fivefold.plan.serving.step import decode_step, prefill
    from fivefold.plan.serving.strategy import ServingStrategy
    from fivefold.plan.serving.this import with_curves
    from fivefold.plan.shape import ModelShape

    profile = measure_device("cpu", [dtype], [1], budget, lambda what: print(f"measuring {what} …"))
    if profile.disturbed:
        print("other processes ran meanwhile: these figures say little")
    cluster = with_curves(cluster_of(profile), profile)
    llm = LLM("smollm2", dtype=dtype, kv_bytes=2**28)
    shape = ModelShape("SmolLM2-135M", llm.engine.decoder.config)
    strategy = ServingStrategy(weights=dtype, kv=dtype)
    _steps(llm, 1, 8, 4)
    for batch in BATCHES:
        times = [seconds for seconds, given in _steps(llm, batch, PROMPT, ANSWER) if given == batch]
        wanted = decode_step(shape, strategy, cluster, batch, PROMPT + ANSWER / 2)
        _line(f"decode, {batch} at once", batch, wanted, times)
    for prompt in (256, LONG):
        times = [sum(seconds for seconds, _ in _steps(llm, 1, prompt, 1)) for _ in range(5)]
        wanted = prefill(shape, strategy, cluster, prompt)
        _line(f"prefill of {prompt}", prompt, wanted, times)


def _steps(llm: object, batch: int, prompt: int, answer: int) -> list[tuple[float, int]]:
    """(seconds, tokens given) of every step."""
    import torch

    from fivefold import SamplingParams

    engine = llm.engine  # type: ignore[attr-defined]
    # One thread's own time does not count what others take of its core.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    draw = random.Random(time.perf_counter_ns())  # no prefix is found again
    params = SamplingParams(max_new_tokens=answer, ignore_eos=True)
    for _ in range(batch):
        engine.add_request([draw.randrange(100, 40_000) for _ in range(prompt)], params)
    steps = []
    while engine.has_work:
        start = clock()
        given = len(engine.step())
        steps.append((clock() - start, given))
    return steps


def _line(what: str, tokens: int, predicted: float, times: list[float]) -> None:
    middle, best = statistics.median(times), min(times)
    print(
        f"{what:20} {tokens / predicted:8.1f} tokens/s predicted, {tokens / middle:8.1f} measured"
        f" ({tokens / best:.1f} at best), {middle / predicted - 1:+.0%}"
        f" ({best / predicted - 1:+.0%})"
    )


def main() -> None:
    """Read the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", nargs="?", type=Path)
    parser.add_argument("--box", action="store_true")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--seconds", type=float, default=0.3, help="for each timing of --box")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    if given.table is not None:
        table(given.table)
    if given.box:
        import torch

        torch.set_num_threads(given.threads)
        box(given.dtype, given.seconds)


if __name__ == "__main__":
    main()

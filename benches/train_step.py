"""Training step of SmolLM2-135M sizes: ours against transformers and torchtitan, in one process.

    python benches/train_step.py                 # bf16, 4 x 512 tokens
    python benches/train_step.py --dtype fp32 --batch 1 --rounds 3 --json
    python benches/train_step.py --side fivefold --rounds 2 --operators
    pip install --no-deps torchtitan==0.3.0 spmd_types==0.3.1 tyro docstring_parser typeguard shtab

Each round times one step of each side (forward, backward, clip, AdamW); the order alternates.
transformers and torchtitan (where it is installed) run bf16 with fp32 parameters under autocast.
Before each step the machine's fp32 GEMM rate is measured for a second: "of peak" is a share of the best
rate that this machine ever showed, "of now" of the median of those, which a shared machine falls to.
Peak memory is measured in a process of its own per side, as the kernel counts it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torchtitan_step import is_installed, torchtitan

SHAPE = {
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "max_position_embeddings": 8192, "rope_theta": 100000.0, "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip


def ours(dtype: str, tokens: torch.Tensor) -> Callable[[], float]:
    from fivefold.axes.apply import apply
    from fivefold.core.config import OptimizerSection, PrecisionSection
    from fivefold.core.layout import Layout
    from fivefold.engines.train.data.batch import Batch
    from fivefold.engines.train.optimizer import MasterOptimizer
    from fivefold.engines.train.step import TrainStep
    from fivefold.model.decoder import Decoder
    from fivefold.model.families import parse_config
    from fivefold.model.objective import Objective

    decoder = Decoder(parse_config(SHAPE))
    decoder.initialize(0)
    axis = apply(
        Objective(decoder),
        layout=Layout(),
        mesh=None,
        precision=PrecisionSection(dtype=dtype),
        recompute="none",
        recompute_every=1,
        compile=False,
    )
    optimizer = MasterOptimizer(axis.masters(), axis.gradients, OptimizerSection())
    step = TrainStep(axis, optimizer, None, 1.0, torch.device("cpu"))
    labels = torch.full_like(tokens, -100)
    labels[:, :-1] = tokens[:, 1:]
    positions = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
    batch = Batch(tokens, labels, positions, None)
    return lambda: step([batch], 3e-4).loss


def theirs(dtype: str, tokens: torch.Tensor) -> Callable[[], float]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{k: v for k, v in SHAPE.items() if k != "model_type"})
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).train()
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


SIDES = {"fivefold": ours, "transformers": theirs}
if is_installed():
    SIDES["torchtitan"] = partial(torchtitan, SHAPE)


def _peak_memory(side: str, arguments: argparse.Namespace, answer: Any) -> None:
    from fivefold.observe.memory import peak_resident_bytes

    torch.set_num_threads(arguments.threads)
    step = SIDES[side](arguments.dtype, _tokens(arguments))
    step()
    step()
    answer.put(peak_resident_bytes())


def _tokens(arguments: argparse.Namespace) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = (arguments.batch, arguments.sequence)
    return torch.randint(0, SHAPE["vocab_size"], shape, generator=generator)


def _gemm_rate(seconds: float = 1.0) -> float:
    """FLOP/s of fp32 products of 2048 x 2048 matrices in the time that is given."""
    a, b = torch.ones(2, 2048, 2048).unbind()
    out, calls, started = torch.empty_like(a), 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        torch.mm(a, b, out=out)
        calls += 1
    return calls * 2 * 2048**3 / (time.perf_counter() - started)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    from fivefold.core.config import RunConfig  # noqa: F401  (fail early when not installed)
    from fivefold.engines.train.recorder import decoder_shape
    from fivefold.model.families import parse_config
    from fivefold.observe.flops import training_flops_per_token
    from fivefold.observe.peak import measured_bandwidth, measured_peak

    torch.set_num_threads(arguments.threads)
    peak = measured_peak("cpu", arguments.dtype)
    flops = training_flops_per_token(decoder_shape(parse_config(SHAPE)), arguments.sequence)
    count = arguments.batch * arguments.sequence
    memory = {}
    chosen = arguments.side or list(SIDES)
    for side in chosen:
        context = multiprocessing.get_context("spawn")
        answer = context.Queue()
        child = context.Process(target=_peak_memory, args=(side, arguments, answer))
        child.start()
        memory[side] = answer.get()
        child.join()
    steps = {side: build(arguments.dtype, _tokens(arguments)) for side, build in SIDES.items()
             if side in chosen}  # fmt: skip
    seconds: dict[str, list[float]] = {side: [] for side in chosen}
    rates: list[float] = []
    for index in range(arguments.rounds + 1):
        for side in chosen if index % 2 else chosen[::-1]:
            rates.append(_gemm_rate())
            started = time.perf_counter()
            steps[side]()
            if index:  # the first round warms up
                seconds[side].append(time.perf_counter() - started)
    now = statistics.median(rates)
    rows = {
        side: {
            "seconds": statistics.median(times),
            "spread": [min(times), max(times)],
            "tokens_per_second": count / statistics.median(times),
            "share_of_peak": count * flops / statistics.median(times) / peak.flops_per_second,
            "share_of_now": count * flops / statistics.median(times) / now,
            "peak_gib": memory[side] / 2**30,
        }
        for side, times in seconds.items()
    }
    ours = rows.get("fivefold")
    ratios = {} if ours is None else {
        side: row["seconds"] / ours["seconds"] for side, row in rows.items() if row is not ours
    }  # fmt: skip
    if arguments.operators:
        print(operator_shares(steps[chosen[0]]))
    return {
        "what": f"SmolLM2-135M sizes, {arguments.batch} x {arguments.sequence}, {arguments.dtype}",
        "threads": arguments.threads,
        "gemm_peak_gflops": peak.flops_per_second / 1e9,
        "gemm_now_gflops": now / 1e9,
        "bandwidth_gb_per_s": measured_bandwidth().bytes_per_second / 1e9,
        "sides": rows,
        "ratios": ratios,
    }


def operator_shares(step: Callable[[], float]) -> str:
    """One step under torch's profiler: the operators by their own time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as found:
        step()
    return str(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=10))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--side", choices=list(SIDES), action="append", help="may be repeated")
    parser.add_argument("--operators", action="store_true", help="also where a step's time goes")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = measure(arguments)
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{found['what']}, {found['threads']} threads; GEMM peak {found['gemm_peak_gflops']:.0f}"
          f" GFLOP/s, now {found['gemm_now_gflops']:.0f}, memory {found['bandwidth_gb_per_s']:.1f} GB/s")  # fmt: skip
    for side, row in found["sides"].items():
        low, high = row["spread"]
        print(f"  {side:<13} {row['tokens_per_second']:8.1f} tok/s   {row['seconds']:.2f} s "
              f"({low:.2f}-{high:.2f})   {row['share_of_peak']:.0%} of peak, "
              f"{row['share_of_now']:.0%} of now   "
              f"{row['peak_gib']:.2f} GiB")  # fmt: skip
    for side, ratio in found["ratios"].items():
        print(f"  ratio of medians: {ratio:.2f}x {side}")


if __name__ == "__main__":
    main()

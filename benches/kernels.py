"""Every operator against its bound and against torch's own, in one process on one machine.

    python benches/kernels.py                     # fp32 and bf16, SmolLM2-135M sizes, 4 x 512
    python benches/kernels.py --dtype fp32 --op cross_entropy --json

The bound of an operator is the larger of its arithmetic over this machine's GEMM peak and of the
bytes it must move over its memory bandwidth, both measured here first. The loss is also measured
in memory: what it takes beyond its operands, in a process of its own a side.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from dataclasses import asdict
from typing import Any

import torch

from fivefold.cli.bench import Measured, measure
from fivefold.kernels.cases import OPERATORS, Sizes, cases
from fivefold.observe.peak import FORMATS, measured_bandwidth, measured_peak


def operators(dtype: str, ops: list[str], seconds: float) -> list[Measured]:
    peak, bandwidth = measured_peak("cpu", dtype), measured_bandwidth("cpu")
    made = cases(Sizes(), FORMATS[dtype], "cpu", ops or OPERATORS)
    return [measure(case, "cpu", peak, bandwidth, seconds) for case in made]


def loss_memory(side: str, dtype: str) -> int:
    """Bytes beyond the operands and their gradients that the loss takes."""
    answer = multiprocessing.get_context("spawn").Queue()
    child = multiprocessing.get_context("spawn").Process(
        target=_loss_memory, args=(side, dtype, answer)
    )
    child.start()
    found = answer.get()
    child.join()
    return found


def _loss_memory(side: str, dtype: str, answer: Any) -> None:
    from fivefold.observe.memory import peak_resident_bytes, resident_bytes

    case = next(cases(Sizes(), FORMATS[dtype], "cpu", ["cross_entropy"]))
    before = resident_bytes()
    (case.run if side == "fivefold" else case.peer)()  # type: ignore[misc]
    answer.put(peak_resident_bytes() - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=list(FORMATS), action="append")
    parser.add_argument("--op", choices=list(OPERATORS), action="append", default=[])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each side of a case")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    for dtype in arguments.dtype or ["fp32", "bf16"]:
        peak, bandwidth = measured_peak("cpu", dtype), measured_bandwidth("cpu")
        if not arguments.json:
            print(
                f"{dtype}: peak {peak.flops_per_second / 1e9:.0f} GFLOP/s, "
                f"memory {bandwidth.bytes_per_second / 1e9:.1f} GB/s, {peak.measured_on}"
            )
        for row in operators(dtype, arguments.op, arguments.seconds):
            if arguments.json:
                print(json.dumps(asdict(row)))
                continue
            ratio = "" if row.against_torch is None else f"{row.against_torch:6.2f}x torch"
            print(
                f"  {row.op:16} {row.what:28} {row.implementation:7} {row.microseconds:10.0f} us "
                f"{row.of_bound:5.0%} of {row.bound:9}{ratio}" + " disturbed" * row.disturbed
            )
    if "cross_entropy" in (arguments.op or OPERATORS):
        ours, theirs = (loss_memory(side, "fp32") for side in ("fivefold", "torch"))
        print(
            f"loss, fp32: {ours / 2**20:.0f} MiB beyond operands, torch {theirs / 2**20:.0f} MiB: "
            f"{ours / theirs:.1%}"
        )


if __name__ == "__main__":
    main()

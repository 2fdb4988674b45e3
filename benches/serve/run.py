"""SmolLM2-135M in fivefold and its peers: offline, then through their OpenAI servers.

    python benches/serve/run.py                            # whichever is installed, bf16, 2 threads
    python benches/serve/run.py --peer fivefold --peer vllm --case a --case c16 --only offline
    python benches/serve/run.py --tiny --rounds 1          # whether everything runs
    python benches/serve/venvs.py vllm llama.cpp openvino  # sets peers up

Figures are medians over rounds, side by side in one run: prompts are equal for all and fresh in
each round, the order changes. TTFT offline is the time of an answer of one token. llama.cpp's
BF16 is requantized from the Q4_1 file; OpenVINO computes from that file itself.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import offline
import served
from cases import CASES, FIGURES, Case, Figure
from peers import PEERS
from peers.peer import Options
from rich.console import Console
from rich.table import Table
from venvs import is_installed
from weights import prepare

Results = dict[str, dict[str, Any]]


def main() -> None:
    arguments = _arguments()
    cases = [CASES[name] for name in arguments.case or CASES]
    cases = [case.tiny() for case in cases] if arguments.tiny else cases
    asked = [PEERS[name] for name in arguments.peer or PEERS]
    here = [peer for peer in asked if is_installed(peer)]
    absent: Results = {
        peer.name: {"failed": f"not installed: python benches/serve/venvs.py {peer.name}"}
        for peer in asked
        if peer not in here
    }
    here = [peer for peer in here if arguments.dtype in peer.dtypes]
    absent |= {
        peer.name: {"failed": f"has no {arguments.dtype}"}
        for peer in asked
        if peer not in here and peer.name not in absent
    }
    folder, gguf = prepare(arguments.dtype)
    options = Options(folder, gguf, arguments.dtype, arguments.threads)
    logs = arguments.out.parent
    logs.mkdir(parents=True, exist_ok=True)
    found: dict[str, Results] = {}
    for way, module in (("offline", offline), ("served", served)):
        if arguments.only in (None, way):
            found[way] = module.measure(here, cases, options, arguments.rounds, logs) | absent
    record = {"about": _about(arguments), **found}
    arguments.out.write_text(json.dumps(record, indent=2) + "\n")
    console = Console()
    for way, results in found.items():
        show(way, results, {case.name: case for case in cases}, console)
    console.print(f"wrote {arguments.out}", style="dim")


def show(way: str, results: Results, cases: dict[str, Case], console: Console) -> None:
    """A column a peer; what fivefold reaches of the best other; why others are missing."""
    measured = {name: result for name, result in results.items() if "failed" not in result}
    table = Table(box=None, header_style="bold", title=way, title_justify="left")
    table.add_column("")
    for name in (*measured, "ours / best peer"):
        table.add_column(name, justify="right")
    for figure in FIGURES:
        if figure.case in cases:
            values = {n: value_of(figure, r, cases) for n, r in measured.items()}
            table.add_row(
                figure.label, *(f"{v:,.4g}" for v in values.values()), _ratio(figure, values)
            )
    loads = [f"{result['load_seconds']:.1f}" for result in measured.values()]
    table.add_row("start, s", *loads, "")
    peaks = [result.get("peak_bytes") for result in measured.values()]
    if peaks and all(peaks):
        table.add_row("memory, GiB", *(f"{peak / 2**30:.2f}" for peak in peaks if peak), "")
    if measured:
        console.print(table)
    for name, result in results.items():
        if "failed" in result:
            console.print(
                f"{name}: {result['failed']}", style="yellow", soft_wrap=True, markup=False
            )


def value_of(figure: Figure, result: dict[str, Any], cases: dict[str, Case]) -> float:
    """One number of one peer."""
    taken = result["cases"][figure.case]
    return figure.of(cases[figure.case], taken["seconds"], taken["first"])


def _ratio(figure: Figure, values: dict[str, float]) -> str:
    others = [value for name, value in values.items() if name != "fivefold"]
    if not others or "fivefold" not in values:
        return ""
    best = others[0]
    for other in others[1:]:
        best = figure.better(best, other)
    return f"{values['fivefold'] / best:.2f}"


def _about(arguments: argparse.Namespace) -> dict[str, Any]:
    from fivefold.observe.hardware import describe_hardware

    return {
        "model": "SmolLM2-135M", "dtype": arguments.dtype, "threads": arguments.threads,
        "rounds": arguments.rounds, "tiny": arguments.tiny, "hardware": describe_hardware("cpu"),
    }  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", action="append", choices=list(PEERS), help="may be repeated")
    parser.add_argument("--case", action="append", choices=list(CASES), help="may be repeated")
    parser.add_argument("--dtype", choices=("bf16", "fp32", "q8_0"), default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("offline", "served"))
    parser.add_argument("--tiny", action="store_true", help="small sizes: whether all runs")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-serve/results.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()

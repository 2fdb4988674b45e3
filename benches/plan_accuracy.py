"""The planner's predictions beside published measurements.

    python benches/plan_accuracy.py [--data FOLDER] [--all] [--json]

Without `--data` the embedded rows. FOLDER may hold `vtrain_a100_single.csv`, `vtrain_a100_multi.csv` (whole
tables of github.com/VIA-Research/vTrain) and `serving_measured.csv` (ai-dynamo/aiconfigurator). `--all` prints
the rows of vTrain too. Nothing is measured here: it runs on any machine, in a minute, and some more for serving.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fivefold.plan.time.bubbles import BUBBLES, SCHEDULES, bubble
from fivefold.plan.time.published import (
    Case,
    deepseek,
    korthikanti,
    llama3,
    mean_error,
    nemo,
    sc21,
    vtrain,
    worst_error,
)


def steps(data: Path | None) -> dict[str, list[Case]]:
    """Cases by table."""
    single = data / "vtrain_a100_single.csv" if data else None
    multi = data / "vtrain_a100_multi.csv" if data else None
    return {
        "SC21 table 1": sc21(),
        "Korthikanti table 5": korthikanti(),
        "vTrain single-node": vtrain(True, single if single and single.exists() else None),
        "vTrain multi-node": vtrain(False, multi if multi and multi.exists() else None),
        "Llama 3 405B": llama3(),
        "NeMo, FP8": nemo(),
        "DeepSeek-V3": deepseek(),
    }


def print_steps(tables: dict[str, list[Case]], every: bool) -> None:
    for name, cases in tables.items():
        print(
            f"\n{name}: {len(cases)} rows, mean absolute error {mean_error(cases):.1%}, "
            f"worst {worst_error(cases):.1%}"
        )
        if len(cases) <= 13 or every:
            for case in cases:
                print(
                    f"  {case.name:58}{case.measured:10.3f} s  predicted {case.predicted:10.3f}"
                    f"{case.error:+8.1%}"
                )


def print_bubbles() -> list[float]:
    differences = []
    print("\nZero bubble, tables 3-5: measured / predicted")
    print(f"  {'model':8}" + "".join(f"{name:>18}" for name in SCHEDULES))
    for model in BUBBLES:
        found = [bubble(model, name) for name in SCHEDULES]
        differences += [abs(a - b) for a, b in zip(found, model.measured, strict=True)]
        cells = "".join(f"{m:>10.4f}/{f:.4f} " for m, f in zip(model.measured, found, strict=True))
        print(f"  {model.name:8}{cells}")
    print(
        f"  largest difference {max(differences):.4f}, mean {sum(differences) / len(differences):.4f}"
    )
    return differences


def print_serving(path: Path) -> dict[str, float]:
    from fivefold.plan.hardware.parse import cluster
    from fivefold.plan.models.parse import shape
    from fivefold.plan.serving import published

    found = published.compare(published.read(path), shape, cluster)
    errors = {name: published.mean_error(found, name) for name in ("ttft", "tpot")}
    print(
        "\nserving: "
        + ", ".join(f"mean absolute error of {k.upper()} {v:.1%}" for k, v in errors.items())
    )
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--json", action="store_true")
    told = parser.parse_args()
    tables = steps(told.data)
    if told.json:
        print(
            json.dumps(
                {
                    name: {"rows": len(c), "mean": mean_error(c), "worst": worst_error(c)}
                    for name, c in tables.items()
                }
            )
        )
        return
    print_steps(tables, told.all)
    print_bubbles()
    if told.data and (told.data / "serving_measured.csv").exists():
        print_serving(told.data / "serving_measured.csv")


if __name__ == "__main__":
    main()

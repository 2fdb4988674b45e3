"""Predicted against measured latencies of serving systems: `python benches/plan_serving.py TABLE`.

TABLE: `serving_measured.csv` of published results.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fivefold.plan.hardware.parse import cluster
from fivefold.plan.models.parse import shape
from fivefold.plan.serving import published


def main(path: Path) -> None:
    """Print the table, and its means."""
    found = published.compare(published.read(path), shape, cluster)
    print(f"{'row':7}{'model':34}{'on':10}{'by':8}{'TTFT':>9}{'is':>9}{'':>7}{'TPOT':>8}{'is':>8}")
    for each in found:
        case = each.case
        deployed = case.deployed
        system = getattr(deployed, "system", None) or deployed.prefill.system
        print(
            f"{case.id:7}{case.model[:32]:34}{case.system[:9]:10}{system.name:8}"
            f"{each.ttft * 1e3:9.0f}{case.ttft * 1e3:9.0f}{each.ttft_error:+7.0%}"
            f"{each.tpot * 1e3:8.2f}{case.tpot * 1e3:8.2f}{each.tpot_error:+7.0%}"
        )
    for name in ("ttft", "tpot"):
        print(f"mean absolute error of {name.upper()}: {published.mean_error(found, name):.1%}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

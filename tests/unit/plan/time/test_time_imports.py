"""A step is planned without torch, which takes seconds to import."""

from __future__ import annotations

import subprocess
import sys


def test_no_torch() -> None:
    code = "import sys, fivefold.plan.time, fivefold.plan.cost; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

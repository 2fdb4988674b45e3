"""What the Triton operators refuse, what they need, and that testing them leaves no trace."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fivefold.kernels.triton import is_available

Call = Callable[..., Any]


def printed_by(code: str) -> str:
    """The last line of what `code` prints, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip().splitlines()[-1]


CAUGHT = """
from fivefold.core.errors import FivefoldError
try:
    from fivefold.kernels.triton.rope import rotate
    rotate(*[torch.zeros(1, 1, 1, 2)] * 3)
except FivefoldError as error:
    print(error)
"""


def test_without_triton_the_extra_is_named() -> None:
    hidden = "import sys, torch; sys.modules['triton'] = None\n"
    assert printed_by(hidden + CAUGHT) == (
        "an operator on a GPU needs the package 'triton'; pip install 'fivefold[gpu]'"
    )


def test_tensors_on_the_cpu_are_refused_in_one_line() -> None:
    if not is_available():
        pytest.skip("triton is not installed")
    assert printed_by("import torch\n" + CAUGHT) == (
        "rotate in Triton needs a GPU, and its tensors are on cpu; "
        "move them to one, or call the operator from fivefold.kernels, which chooses"
    )


def test_the_package_alone_imports_no_triton() -> None:
    code = (
        "import sys, fivefold.kernels.triton as t; t.is_available(); print('triton' in sys.modules)"
    )
    assert printed_by(code) == "False"


def test_the_interpreter_lives_in_its_own_process(interpreter: Call) -> None:
    interpreter("rope", "rotate", torch.ones(1, 1, 1, 2), *[torch.ones(1, 1, 1)] * 2)
    assert "TRITON_INTERPRET" not in os.environ
    assert not any(name.startswith("fivefold.kernels.triton.") for name in sys.modules)


X = torch.zeros(4, 2, 8)
STARTS = torch.tensor([0, 4], dtype=torch.int32)
RULE = (True, 0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("module", "function", "arguments", "message"),
    [
        ("rms_norm", "rms_norm", (X.double(), X[0, 0], 1e-5), "takes fp32, bf16 and fp16, not"),
        ("matmul", "matmul", (X[0], X[0]), r"give \[M,K\] and \[K,N\] of one format"),
        ("int8_linear", "int8_linear", (X[0], X[0], X[0, 0]), "give int8 weights"),
        ("grouped_linear", "grouped_multiply", (X[0], X, STARTS), r"give \[M,I\], \[X,O,I\]"),
        ("grouped_linear", "grouped_outer", (X[0], X[:, 0], STARTS), "as many rows"),
        (
            "flash_attention", "flash_attention",
            (X, X[:, :, :7], X, STARTS, STARTS, *RULE), "H a multiple of K",
        ),
        (
            "flash_attention", "flash_attention",
            (X, X, X, STARTS, STARTS[:1], *RULE), "1 sequences of queries and 0 of keys",
        ),
        (
            "flash_attention", "flash_attention",
            (*[torch.zeros(4, 1, 257)] * 3, STARTS, STARTS, *RULE), "heads of up to 256 dims, not 257",
        ),
        (
            "paged_attention", "paged_attention",
            (X, X[None], X[None], STARTS[None], STARTS, STARTS, *RULE[1:]), "give S, S and S",
        ),
        (
            "paged_attention", "paged_attention",
            (X, X[None], X[None, :, :1], STARTS[None], STARTS, STARTS, *RULE[1:]), "over caches",
        ),
        ("cross_entropy", "log_probs", (X[0].mT, STARTS, 0.0), "dense rows"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_one_line(
    interpreter: Call, module: str, function: str, arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(AssertionError, match=f"FivefoldError.*{message}"):
        interpreter(module, function, *arguments)

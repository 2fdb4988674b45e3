"""`fivefold serve`: what it refuses before it serves, each in one line."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from fivefold.cli.main import main
from fivefold.cli.serve import as_bytes


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr of a command that fails."""
    with pytest.raises(SystemExit) as ended:
        main(["serve", *arguments])
    assert ended.value.code == 1
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1, errors
    return errors


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--kv-memory", "much"), "--kv-memory much is no size; write e.g. 512M or 4G"),
        (("--max-body", "0"), "--max-body 0 is no size"),
        (("--layout", "cp=2"), "layout cp=2 is not served; use tp, pp, ep, dp_replicate"),
        (("--layout", "tp=3,ep=2"), "layout tp=3,ep=2: neither divides the other; use ep=3"),
        (("--layout", "dp_replicate=0"), "not a positive whole number"),
        (("--api-keys", "no/such.yaml"), "cannot read the API keys in no/such.yaml"),
        (("--tool-parser", "hermse"), "hermse is unknown; did you mean 'hermes'?"),
        (("--reasoning-parser", "thonk"), "thonk is unknown"),
        (("--host", "203.0.113.1", "--port", "0"), "cannot listen on 203.0.113.1 port 0"),
    ],
)
def test_options_that_cannot_be(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str
) -> None:
    assert told in refused(capsys, *arguments)


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in refused(
            capsys, "--port", port
        )


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    errors = refused(capsys, "--model", str(tmp_path / "none"), "--port", "0")
    assert f"there is no {tmp_path / 'none'}" in errors


def test_sizes() -> None:
    assert as_bytes("x", "512M") == 512 << 20
    assert as_bytes("x", "1.5GiB") == 3 << 29
    assert as_bytes("x", "64k") == 64 << 10
    assert as_bytes("x", "100") == 100

"""All that a load is told: checked before a byte is sent."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from fivefold.core.errors import nearest
from fivefold.engines.serve.load.errors import LoadError
from fivefold.engines.serve.load.material import TokenIds, Words, common_words, words_of
from fivefold.engines.serve.load.slo import parse_slo
from fivefold.engines.serve.load.target import Endpoint
from fivefold.engines.serve.load.workload import Fit

Workload = Literal["random", "fixed", "azure", "mooncake", "file"]
TRACES = ("azure", "mooncake")
COUNTS = (
    "input_tokens", "output_tokens", "prefixes", "vocabulary", "requests", "max_prompt_tokens",
    "max_output_tokens",
)  # fmt: skip


@dataclass(frozen=True)
class LoadSettings:
    """Immutable. A wrong or contradicting value raises LoadError."""

    url: str
    model: str | None = None
    """None: the server's first."""
    endpoint: Endpoint = "completions"
    workload: Workload = "random"
    prompts_as: Literal["ids", "text"] | None = None
    """None: ids for completions, text for chat and for texts of a file."""
    input_tokens: int = 512
    output_tokens: int = 128
    spread: float = 0.5
    """Of `random`: lengths lie this share around those above."""
    shared_prefix: int = 0
    prefixes: int = 1
    trace: Path | None = None
    prompts: Path | None = None
    text: Path | None = None
    """Whose words prompts are made of; None: common words."""
    length_scale: float = 1.0
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    rates: tuple[float, ...] = ()
    arrivals: Literal["poisson", "fixed"] = "poisson"
    concurrency: tuple[int, ...] = ()
    """With neither rates nor this: a trace's own times, else one request at a time."""
    speed: float = 1.0
    """How much faster than recorded a trace's times pass."""
    requests: int | None = None
    duration: float | None = None
    warmup: int = 2
    slo: str | None = None
    timeout: float = 600.0
    seed: int = field(default_factory=lambda: secrets.randbelow(2**31))
    """Equal seeds make equal prompts: a server may then have them in its cache."""
    vocabulary: int = 1000
    ignore_eos: bool = True
    temperature: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)
    api_key: str | None = None

    def __post_init__(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise LoadError(f"{_option(name)} is {value}", "give a whole number above 0")
        if self.workload not in get_args(Workload):
            raise LoadError(
                f"no workload {self.workload!r}", nearest(self.workload, get_args(Workload))
            )
        if self.rates and self.concurrency:
            raise LoadError(
                "--rate and --concurrency are two kinds of load", "give one of them; it may repeat"
            )
        if any(users < 1 for users in self.concurrency):
            raise LoadError("--concurrency is below 1", "give how many ask at once")
        self._check_files()
        if self.form == "ids" and self.endpoint == "chat":
            raise LoadError("chat takes no token ids", "leave out --prompts-as, or give text")
        for name in ("duration", "timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise LoadError(f"{_option(name)} is {value}", "give seconds above 0")
        _ = self.limits, self.fit

    def _check_files(self) -> None:
        for name, wanted in (
            ("trace", self.workload in TRACES),
            ("prompts", self.workload == "file"),
        ):
            path = getattr(self, name)
            if wanted and path is None:
                raise LoadError(f"--workload {self.workload} needs --{name} FILE", "give it")
            if not wanted and path is not None:
                fitting = "azure or mooncake" if name == "trace" else "file"
                raise LoadError(
                    f"--workload {self.workload} does not read --{name}",
                    f"give --workload {fitting}",
                )
        if self.shared_prefix and self.workload not in ("random", "fixed"):
            raise LoadError(
                f"--workload {self.workload} has no --shared-prefix",
                "give --workload random or fixed",
            )
        if self.text is not None and self.form == "ids":
            raise LoadError("--text makes texts, not token ids", "add --prompts-as text")

    @property
    def form(self) -> Literal["ids", "text"]:
        """Whether prompts are token ids or text."""
        if self.prompts_as is not None:
            return self.prompts_as
        return "text" if self.endpoint == "chat" or self.workload == "file" else "ids"

    @property
    def fit(self) -> Fit:
        """How a trace's lengths are changed."""
        return Fit(self.length_scale, self.max_prompt_tokens, self.max_output_tokens)

    @property
    def limits(self) -> dict[str, float]:
        """The SLO."""
        return {} if self.slo is None else parse_slo(self.slo)

    def material(self) -> TokenIds | Words:
        """What prompts are made of. Raises LoadError for a text that cannot be read."""
        if self.form == "ids":
            return TokenIds(self.vocabulary, self.seed)
        return Words(self.seed, common_words if self.text is None else words_of(self.text))


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")

"""API keys: who may ask, how much, and whose prefixes they share. Keys are kept as hashes alone."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fivefold.core.errors import ConfigError, one_line
from fivefold.engines.serve.server.api_errors import APIError
from fivefold.engines.serve.server.rate_limit import Allowance

PREFIX = "ff-"


class KeyEntry(BaseModel):
    """One key in the file."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(min_length=1)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    tenant: str | None = None
    """Requests of one tenant share cached prefixes; by default each name is its own."""
    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: Annotated[list[KeyEntry], Field(min_length=1)]


@dataclass(slots=True)
class Caller:
    """Who asks: their limits, and the tenant that their prefixes belong to."""

    name: str = ""
    tenant: str = ""
    requests: Allowance | None = None
    tokens: Allowance | None = None

    def admit(self) -> None:
        """Count a request. Raises APIError 429 beyond a limit."""
        for allowance, what in ((self.tokens, "tokens"), (self.requests, "requests")):
            wait = allowance.wait() if allowance is not None else 0.0
            if allowance is not None and wait > 0:
                raise APIError(
                    429,
                    f"key {self.name!r} has used its {allowance.per_minute} {what} per minute; "
                    f"try again in {wait:.0f} s",
                    code="rate_limit_exceeded",
                    retry_after=wait,
                )
        if self.requests is not None:
            self.requests.take(1)

    def charge(self, tokens: int) -> None:
        """Count tokens that were read or produced."""
        if self.tokens is not None:
            self.tokens.take(tokens)


@dataclass(slots=True)
class Keys:
    """The known keys; none at all means that everybody may ask."""

    entries: list[tuple[bytes, Caller]] = field(default_factory=list)

    @classmethod
    def from_file(cls, path: Path) -> Keys:
        """Read a YAML file (see docs/engines/serve.md). Raises ConfigError naming what is wrong."""
        mend = "write keys: as `fivefold serve-key` prints them"
        try:
            found = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(
                f"cannot read the API keys in {path}: {one_line(error)}", mend
            ) from None
        try:
            entries = _File.model_validate(found).keys
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the file"
            raise ConfigError(f"{path}: {where}: {first['msg'].lower()}", mend) from None
        names = [entry.name for entry in entries]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"{path}: two keys are named {name!r}", "rename one")
        return cls([(bytes.fromhex(entry.sha256), _caller(entry)) for entry in entries])

    def caller(self, authorization: str | None) -> Caller:
        """Whose key an Authorization header brings. Raises APIError 401."""
        if not self.entries:
            return Caller()
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise APIError(
                401, "no API key: send the header `Authorization: Bearer KEY`", code="no_api_key"
            )
        digest, found = _digest(key.strip()), None
        for known, caller in self.entries:  # all of them, whichever it is: equal time
            if hmac.compare_digest(known, digest):
                found = caller
        if found is None:
            raise APIError(401, "this API key is not known", code="invalid_api_key")
        return found


def new_key() -> tuple[str, str]:
    """A key and the hash to keep of it. Keys are random, so a plain hash tells nothing."""
    key = PREFIX + secrets.token_urlsafe(32)
    return key, _digest(key).hex()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _caller(entry: KeyEntry) -> Caller:
    def allowance(per_minute: int | None) -> Allowance | None:
        return None if per_minute is None else Allowance(per_minute)

    return Caller(
        entry.name,
        entry.tenant or entry.name,
        allowance(entry.requests_per_minute),
        allowance(entry.tokens_per_minute),
    )

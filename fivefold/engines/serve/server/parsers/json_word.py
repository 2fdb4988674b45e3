"""Numbers, true, false and null: which character may follow what was read of one.

A state is called after a word that leads to it: "1." stands for all that is digits and a point.
"""

from __future__ import annotations


def _after(**next_states: str) -> dict[str, str]:
    """{character: state}; `digits` and `e` stand for all of theirs."""
    digits, e = next_states.pop("digits", None), next_states.pop("e", None)
    found = {} if digits is None else dict.fromkeys("0123456789", digits)
    return found if e is None else {**found, "e": e, "E": e}


NEXT: dict[str, dict[str, str]] = {
    "": {**_after(digits="1"), "0": "0", "-": "-"},
    "-": {**_after(digits="1"), "0": "0"},
    "0": {**_after(e="1e"), ".": "1."},
    "1": {**_after(digits="1", e="1e"), ".": "1."},
    "1.": _after(digits="1.1"),
    "1.1": _after(digits="1.1", e="1e"),
    "1e": {**_after(digits="1e1"), "+": "1e+", "-": "1e+"},
    "1e+": _after(digits="1e1"),
    "1e1": _after(digits="1e1"),
}
COMPLETE = {"0", "1", "1.1", "1e1", "true", "false", "null"}
"""States in which the word may end."""

for _literal in ("true", "false", "null"):
    for _place, _char in enumerate(_literal):
        NEXT.setdefault(_literal[:_place], {})[_char] = _literal[: _place + 1]
    NEXT[_literal] = {}

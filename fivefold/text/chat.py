"""Chat templates: Jinja in a sandbox, with what Hugging Face templates expect to find."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fivefold.core.errors import TokenizerError, one_line

Message = Mapping[str, Any]

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class ChatTemplate:
    """Turns messages (`role`, `content`, …) into the text a model was taught to continue."""

    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token, …

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The conversation as text; `variables` (tools, …) are handed to the template.

        Special tokens are part of the text: encode it with `add_special=False`. Raises
        TokenizerError when the template is no Jinja, or refuses the messages.
        """
        given = {"tools": None, "documents": None, **self.special_tokens, **variables}
        # A key without a value would be rendered as "None".
        plain = [{k: v for k, v in message.items() if v is not None} for message in messages]
        try:
            return _compile(self.source).render(
                messages=plain, add_generation_prompt=add_generation_prompt, **given
            )
        except TokenizerError:
            raise
        except Exception as error:  # a template may fail in any way that Python can
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise TokenizerError(
                f"the chat template refused the messages (roles {roles or 'none'}): "
                f"{type(error).__name__}: {one_line(error)}",
                "change the messages, or choose a model whose template takes them",
            ) from None


@lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals = {
        "range": environment.globals["range"],  # bounded by the sandbox
        "dict": _make_dict,
        "namespace": _TemplateNamespace,
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise TokenizerError(
            f"the chat template is no Jinja: line {error.lineno}: {one_line(error)}",
            "mend chat_template in the tokenizer's folder",
        ) from None


class _Generation(jinja2.ext.Extension):
    """Accepts `{% generation %} … {% endgeneration %}`, which marks answers and prints its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 reads it from the class)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TemplateNamespace(jinja2.utils.Namespace):
    """A namespace that stores no `_names`: a template gets no hold of Python's insides."""

    def __init__(*args: Any, **named: Any) -> None:
        jinja2.utils.Namespace.__init__(*args, **named)
        for name in dict(*args[1:], **named):
            _check_attribute(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} is not allowed")


def _make_dict(*items: Any, **named: Any) -> dict[Any, Any]:
    return dict(*items, **named)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which models were not taught.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)

"""From a form to what says, token by token, how an answer may go on: by XGrammar (Dong et al. 2024)."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from fivefold.core.errors import PromptError, one_line
from fivefold.engines.serve.structured.form import StructuredOutputs
from fivefold.engines.serve.structured.schema import held
from fivefold.text.tokenizer import Tokenizer

MOST_KEPT = 32
"""Forms whose compiled grammars are kept, of some megabytes each."""
THREADS = 2
STRICTER = (
    # A model that has lost its way would write blanks for ever.
    (r"[ \n\r\t]*", r"[ \n\r\t]{0,32}"),
    # XGrammar 0.2.9 lets strings have halves of surrogate pairs, which UTF-8 has no bytes for, and
    # those of a bounded length control characters, which JSON forbids.
    (r"[^\"\\\r\n]", r"[^\"\\\x00-\x1f\uD800-\uDFFF]"),
    (r"[^\0-\x1f\"\\\r\n]", r"[^\0-\x1f\"\\\r\n\uD800-\uDFFF]"),
)
_PLACE = re.compile(r"^(\[[^]]*\] )?\S+\.(cc|h):\d+: ")
_LOADING = threading.Lock()


class Grammars:
    """Compiles forms for one vocabulary; what was compiled is kept.

    `vocab_size`: columns of the logits. `end_tokens` may end an answer once its form is complete.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, end_tokens: Sequence[int]
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.end_tokens = list(end_tokens)
        self._compiler: Any = None
        self._compiled: OrderedDict[StructuredOutputs, Any] = OrderedDict()  # the last used last

    def matcher(self, form: StructuredOutputs) -> Any:
        """An `xgrammar.GrammarMatcher` at the beginning of an answer.

        Raises PromptError for a form that cannot be read, for a tokenizer whose tokens have no
        fixed spelling, and where XGrammar is missing.
        """
        xgrammar = load()
        if form not in self._compiled:
            self._compiled[form] = self._compile(xgrammar, form)
            while len(self._compiled) > MOST_KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(form)
        return xgrammar.GrammarMatcher(self._compiled[form])

    def _compile(self, xgrammar: Any, form: StructuredOutputs) -> Any:
        if self._compiler is None:
            self._compiler = self._new_compiler(xgrammar)
        try:
            return _compile(xgrammar, self._compiler, form)
        except PromptError:
            raise
        except Exception as error:  # of XGrammar's own kinds, and RuntimeError
            raise PromptError(
                f"the form cannot be read: {_reason(error)}", "see docs/engines/structured.md"
            ) from None

    def _new_compiler(self, xgrammar: Any) -> Any:
        tokenizer = self.tokenizer
        if tokenizer is None or tokenizer.spelling is None:
            raise PromptError(
                "structured_outputs needs a tokenizer that spells texts token by token",
                "ask for the form in the prompt",
            )
        if not self.end_tokens:
            raise PromptError(
                "the model has no end-of-sequence token, which ends an answer of a given form",
                "ask for the form in the prompt",
            )
        spell, special = tokenizer.spelling.bytes_of, tokenizer.special_ids
        # XGrammar leaves out tokens without bytes: special ones, and columns that pad the logits.
        words = [b"" if i in special else spell(i) for i in range(self.vocab_size)]
        info = xgrammar.TokenizerInfo(
            words, vocab_size=self.vocab_size, stop_token_ids=self.end_tokens
        )
        return xgrammar.GrammarCompiler(info, max_threads=THREADS, cache_enabled=False)


def load() -> Any:
    """XGrammar; it takes a second. Raises PromptError where it is not installed."""
    with _LOADING:
        try:
            import xgrammar
        except ImportError:
            raise PromptError(
                "structured_outputs needs XGrammar", "pip install 'fivefold[structured]'"
            ) from None
    return xgrammar


def _compile(xgrammar: Any, compiler: Any, form: StructuredOutputs) -> Any:
    if form.json is not None or form.json_object:
        schema = {"type": "object"} if form.json is None else held(json.loads(str(form.json)))
        grammar = xgrammar.Grammar.from_json_schema(json.dumps(schema))
        return compiler.compile_grammar(_strict_json(grammar))
    if form.structural_tag is not None:
        tag = _with_held_schemas(json.loads(str(form.structural_tag)))
        grammar = xgrammar.Grammar.from_structural_tag(json.dumps(tag))
        return compiler.compile_grammar(_strict_json(grammar))
    if form.regex is not None:
        return compiler.compile_regex(form.regex)
    if form.choice is not None:
        return compiler.compile_grammar("root ::= " + " | ".join(map(_literal, form.choice)))
    return compiler.compile_grammar(form.grammar)


def _strict_json(grammar: Any) -> str:
    """The grammar's text, with the changes that are said beside `STRICTER`."""
    text = str(grammar)
    for loose, strict in STRICTER:
        text = text.replace(loose, strict)
    return text


def _with_held_schemas(tag: Any) -> Any:
    if isinstance(tag, list):
        return [_with_held_schemas(part) for part in tag]
    if not isinstance(tag, dict):
        return tag
    return {
        name: held(part, name) if name == "json_schema" else _with_held_schemas(part)
        for name, part in tag.items()
    }


def _literal(text: str) -> str:
    """In quotes. JSON's escapes would be two halves of a pair for an emoji, and no character here."""
    return json.dumps(text, ensure_ascii=False)


def _reason(error: Exception) -> str:
    """What XGrammar says, without the time and the place in its source that it may begin with."""
    return _PLACE.sub("", one_line(error))

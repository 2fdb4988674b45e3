"""Chat templates render as transformers renders them, in a sandbox."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from text_cases import byte_level_tokenizer, smollm2_tokenizer
from transformers import PreTrainedTokenizerFast

from fivefold.core.errors import TokenizerError
from fivefold.text.chat import CHATML, ChatTemplate

LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{%- set date_string = strftime_now("%d %b %Y") %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}{{ "\\n" }}{{ tool | tojson }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string %}
        {%- set ns.searching = false %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" and '</think>' in message.content %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {%- set thought = message.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
        {%- if loop.index0 > ns.last_query %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- endif %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {%- if loop.index > 3 %}{%- break %}{%- endif %}
            {%- if call.name == 'hidden' %}{%- continue %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments | tojson(sort_keys=true) ~ '}\\n</tool_call>' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- else -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\\n'}}
{%- endif -%}
"""
GENERATION = """{% for m in messages %}
    {% if m.role == 'assistant' %}
[{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}]
    {% else %}
{{ m.content }}{# a comment #}{{ m.name }}{{ m.absent }}
    {% endif %}
{% endfor %}"""

TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": " What is 2 + 2? <b>&amp;</b> 'quoted' \"twice\" é 日本 "},
    {"role": "assistant", "content": "<think>\nsums\n</think>\n\n4.", "name": None},
    {"role": "user", "content": "And the\n\nweather?", "name": None, "tool_calls": None},
    {"role": "assistant", "content": "<think>I will ask</think>Fine."},
]
SYSTEM = {"role": "system", "content": "  Be brief. "}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"city": "<São Paulo>", "n": [1, 2.5, None]}},
    }
]
CALLS = [
    {"name": "hidden", "arguments": {}},
    {"name": "weather", "arguments": {"z": 1, "a": "ü"}},
    {"name": "third", "arguments": {"x": True}},
    {"name": "fourth", "arguments": {}},
]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": TURNS[:1],
    "two": TURNS[:2],
    "four": TURNS,
    "system": [SYSTEM, *TURNS[:3]],
    "calls": [TURNS[0], TURNS[1] | {"tool_calls": CALLS}, TURNS[2]],
    "parts": [{"role": "user", "content": [{"type": "text", "text": " a "}, {"type": "image"}]}],
}
TEMPLATES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "qwen3": QWEN3,
    "gemma": GEMMA,
    "generation": GENERATION,
}


def theirs(template: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level_tokenizer().backend,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template=template,
    )


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize(
    ("template", "conversation"),
    [
        pair
        for pair in itertools.product(TEMPLATES, CONVERSATIONS)
        if pair[1] != "parts" or pair[0] == "gemma"
    ],
)
def test_renders_as_transformers_does(template: str, conversation: str, prompt: bool) -> None:
    source, messages = TEMPLATES[template], CONVERSATIONS[conversation]
    special = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    for extra in ({}, {"tools": TOOLS}, {"enable_thinking": False}):
        rendered = ChatTemplate(source, special).render(messages, prompt, **extra)
        expected = theirs(source).apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt, **extra
        )
        assert rendered == expected


@pytest.mark.parametrize("conversation", ["one", "two", "four", "system"])
def test_smollm2s_own_template_and_ids(conversation: str) -> None:
    tokenizer = smollm2_tokenizer()
    assert tokenizer.chat is not None
    other = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend, chat_template=tokenizer.chat.source
    )
    messages = CONVERSATIONS[conversation]
    rendered = tokenizer.chat.render(messages)
    assert rendered == other.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    ids = other.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert tokenizer.encode(rendered, add_special=False) == ids


def test_what_the_template_refuses_is_one_line() -> None:
    with pytest.raises(TokenizerError, match="roles user, user") as error:
        ChatTemplate(GEMMA, {"bos_token": ""}).render([TURNS[0], TURNS[0]])
    assert "roles must alternate" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("line\n{% for m in messages %}", "no Jinja: line 2"),
        ("{{ messages[9].content }}", "UndefinedError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ messages | no_such_filter }}", "no_such_filter"),
    ],
)
def test_a_broken_template_is_one_line(source: str, message: str) -> None:
    with pytest.raises(TokenizerError, match=message) as error:
        ChatTemplate(source).render(TURNS)
    assert "\n" not in str(error.value)


def test_a_namespace_stores_no_underscored_names() -> None:
    for source in ("{% set n = namespace(_a=1) %}", "{% set n = namespace() %}{% set n._a = 1 %}"):
        with pytest.raises(TokenizerError, match="SecurityError: namespace attribute '_a'"):
            ChatTemplate(source).render(TURNS)
    allowed = "{% set n = namespace({'b': 2}, a=1) %}{% set n.a = n.a + n.b %}{{ n.a }}"
    assert ChatTemplate(allowed).render(TURNS) == "3"


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__globals__ }}",
        "{{ messages.append({}) }}",
        "{{ messages[0].update({'content': 'other'}) }}",
        "{{ dict.__base__ }}",
        "{% set n = namespace(__class__=1) %}",
        "{% set n = namespace() %}{% set n.__init__ = 1 %}",
        "{{ lipsum.__globals__ }}",
        "{{ range(10 ** 9) | list }}",
        "{{ self.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_a_template_gets_no_hold_of_python(attack: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    try:
        text = ChatTemplate(attack).render(messages)
    except TokenizerError:
        text = ""
    assert text.strip() == ""  # an attribute that the sandbox withholds is printed as nothing
    assert messages == [{"role": "user", "content": "hi"}]

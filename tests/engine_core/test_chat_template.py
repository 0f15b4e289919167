"""Chat templates: transformers' dialect, in a sandbox, with plain errors."""

import re
from typing import Any

import pytest
from tool_templates import HERMES_TEMPLATE, LLAMA_TEMPLATE, MISTRAL_TEMPLATE

from engine_core import chat_template
from engine_core.chat_template import ChatTemplate
from engine_core.errors import InvalidRequestError, ModelError
from engine_core.tool_calls import HERMES, LLAMA, MISTRAL, PROBE_TOOL, ToolFormat

ECHO = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
USER = [{"role": "user", "content": "Hi"}]


def render(source: str, messages: list[dict[str, Any]] = USER, **variables: str) -> str:
    return ChatTemplate(source, variables).render(messages)


def test_the_prompt_ends_where_the_assistant_goes_on() -> None:
    source = ECHO + "{% if add_generation_prompt %}[assistant:{% endif %}"

    assert render(source) == "[user:Hi][assistant:"


def test_a_template_may_refuse_in_its_own_words() -> None:
    source = "{{ raise_exception('Roles must alternate') }}"

    with pytest.raises(InvalidRequestError, match="refuses these messages: Roles must alternate"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[5].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ 1 // 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_what_goes_wrong_inside_is_a_400_not_a_crash(source: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render(source)

    assert caught.value.param == "messages"


def test_the_prompt_has_a_longest_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 1000)

    with pytest.raises(InvalidRequestError, match="longer than 1,000 characters"):
        render("{% for i in range(2000) %}x{{ i }}{% endfor %}")


def test_a_broken_template_is_the_models_error() -> None:
    with pytest.raises(ModelError, match="chat template has an error"):
        ChatTemplate("{% for %}", {})


def test_blocks_leave_no_blank_lines() -> None:
    source = "a\n  {% if true %}\nb\n  {% endif %}\nc"

    assert render(source) == "a\nb\nc"


def test_json_is_not_escaped_for_html() -> None:
    assert render("{{ {'é': '<a>'} | tojson }}") == '{"é": "<a>"}'
    assert render("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}").startswith(
        '{\n "a": 2'
    )


def test_loops_can_break_and_training_marks_are_ignored() -> None:
    source = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"

    assert render(source + "{% generation %}!{% endgeneration %}") == "01!"


def test_the_template_knows_the_date_and_the_models_tokens() -> None:
    rendered = render("{{ bos_token }}{{ strftime_now('%Y') }}", bos_token="<s>")

    assert re.fullmatch(r"<s>20\d\d", rendered)


@pytest.mark.parametrize(
    "source",
    [
        ECHO,
        "{%- for m in messages -%}\n  {{- m['role'] | upper ~ ': ' ~ m.content | trim }}\n{%- endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{% if tools is none and not documents %} no tools{% endif %}",
        "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
        "{% if messages[0].role == 'system' %}x{% else %}{{ eos_token }}{% endif %}",
    ],
)
def test_rendering_equals_transformers(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [
        {"role": "user", "content": " a <b> 中 "},
        {"role": "assistant", "content": "c"},
    ]
    theirs, _ = render_jinja_template(
        [messages], chat_template=source, add_generation_prompt=True, eos_token="</s>"
    )

    assert render(source, messages, eos_token="</s>") == theirs[0]


@pytest.mark.parametrize(
    ("source", "form"),
    [(HERMES_TEMPLATE, HERMES), (MISTRAL_TEMPLATE, MISTRAL), (LLAMA_TEMPLATE, LLAMA)],
    ids=["hermes", "mistral", "llama"],
)
def test_the_way_a_template_writes_tool_calls_is_found(source: str, form: ToolFormat) -> None:
    assert ChatTemplate(source, {}).tool_format is form


@pytest.mark.parametrize(
    "source",
    [
        ECHO,
        "{{ tools | tojson }}" + ECHO,  # calls are left out
        HERMES_TEMPLATE.replace("tool | tojson", "1"),  # the tools are
        HERMES_TEMPLATE.replace('{"name": "\' ~ ', "<function=' ~ "),
        HERMES_TEMPLATE.replace("<tool_call>", "<|call|>"),
        HERMES_TEMPLATE.replace("'}\n</tool_call>'", "'}'"),
        HERMES_TEMPLATE.replace("arguments | tojson", "arguments | string"),
        LLAMA_TEMPLATE.replace('{{- \'{"name"', '{{- \'<|call|>{"name"'),
        MISTRAL_TEMPLATE.replace("'[TOOL_CALLS] ['", "'[TOOL_CALLS]f['"),
        "{{ raise_exception('no') }}",
    ],
)
def test_other_ways_of_calling_tools_are_not_understood(source: str) -> None:
    assert source not in (HERMES_TEMPLATE, LLAMA_TEMPLATE, MISTRAL_TEMPLATE)
    assert ChatTemplate(source, {}).tool_format is None


def test_tools_are_shown_only_where_there_are_some() -> None:
    template = ChatTemplate(HERMES_TEMPLATE, {})

    assert "probe_tool" in template.render(USER, [PROBE_TOOL])
    assert "Tools" not in template.render(USER)

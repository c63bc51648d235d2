import datetime
from typing import Any

import pytest

from pinnate.core.errors import InvalidRequestError
from pinnate.text import chat_template
from pinnate.text.chat_template import ChatTemplate
from tests.unit.text.helpers import default_tokenizer

CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
USER = [{"role": "user", "content": "hi"}]
PREFILL = [*USER, {"role": "assistant", "content": "1, 2, "}]


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages or USER, **options)


def test_default_model_prompt_lengths() -> None:
    tokenizer = default_tokenizer()
    assert tokenizer.chat_template is not None
    template = ChatTemplate(tokenizer.chat_template)
    text = template.render(USER)
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert len(tokenizer.encode(text, add_special_tokens=False)) == 31
    with_system = template.render([{"role": "system", "content": "S"}, *USER])
    assert len(tokenizer.encode(with_system, add_special_tokens=False)) == 16


def test_generation_prompt_is_optional() -> None:
    assert render(CHATML) == "<|user|>hi<|end|>\n<|assistant|>"
    assert render(CHATML, add_generation_prompt=False) == "<|user|>hi<|end|>\n"


def test_special_tokens_and_variables_reach_the_template() -> None:
    assert render("{{ bos_token }}{{ x }}{{ eos_token }}", x=3) == "<s>3</s>"
    assert render("{{ tools is none }} {{ documents is none }}") == "True True"
    assert render("{{ tools[0].name }}", tools=[{"name": "f"}]) == "f"


def test_blocks_are_trimmed_and_loops_can_break() -> None:
    source = "{% for i in range(9) %}\n    {% if i == 2 %}{% break %}{% endif %}\n{{ i }}\n{% endfor %}\n"
    assert render(source) == "0\n1\n"


def test_tojson_is_plain_json() -> None:
    value = {"b": "<é'>", "a": [1, None]}
    assert render("{{ x | tojson }}", x=value) == '{"b": "<é\'>", "a": [1, null]}'
    assert render("{{ x | tojson(indent=1, sort_keys=true) }}", x={"b": 1, "a": 2}) == '{\n "a": 2,\n "b": 1\n}'


def test_strftime_now_and_generation_block() -> None:
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.datetime.now().year + d) for d in (-1, 0)}
    assert render("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c") == "abhic"


def test_a_refusal_carries_the_templates_own_message() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render("{{ raise_exception('System role is refused here') }}")
    assert caught.value.message == "System role is refused here"
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.missing.deeper }}",
        "{{ 1 + messages[0].content }}",
        "{% for %}",
        "{{ unknown_function() }}",
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__subclasses__() }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_anything_that_goes_wrong_in_a_template_is_a_bad_request(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template failed") as caught:
        render(source)
    assert "\n" not in caught.value.message


def test_a_runaway_template_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 1000)
    with pytest.raises(InvalidRequestError, match="more than 1000 characters"):
        render("{% for i in range(2000) %}xx{% endfor %}")


def test_continue_final_message_ends_with_its_content() -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(CHATML, PREFILL, **options) == "<|user|>hi<|end|>\n<|assistant|>1, 2, "
    trimming = CHATML.replace("m['content']", "m['content'] | trim")
    assert render(trimming, PREFILL, **options) == "<|user|>hi<|end|>\n<|assistant|>1, 2,"
    assert PREFILL[-1]["content"] == "1, 2, "


def test_continue_final_message_with_the_content_said_before() -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
    text = render(CHATML, messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<|user|>x<|end|>\n<|assistant|>x"


def test_continue_final_message_with_content_parts() -> None:
    source = "{% for m in messages %}[{% for p in m.content %}{{ p.text }};{% endfor %}]{% endfor %}"
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render(source, parts, add_generation_prompt=False, continue_final_message=True) == "[a;b"


@pytest.mark.parametrize(
    ("source", "messages", "message"),
    [
        (CHATML, [{"role": "assistant", "content": None}], "needs a last message with text"),
        (CHATML, [{"role": "assistant"}], "needs a last message with text"),
        ("fixed", PREFILL, "does not write the final message"),
    ],
)
def test_continue_final_message_that_cannot_be(source: str, messages: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        render(source, messages, add_generation_prompt=False, continue_final_message=True)


def test_both_flags_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="cannot both be true"):
        render(CHATML, PREFILL, add_generation_prompt=True, continue_final_message=True)

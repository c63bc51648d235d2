"""Which format a template was written for, and why."""

from __future__ import annotations

import pytest

from pinnate.core.errors import ConfigError
from pinnate.text.parsers.registry import choose_reasoning_format, choose_tool_format

QWEN = "{% if tools %}<tools></tools> within <tool_call></tool_call>{% endif %}{{ '<think>\\n\\n</think>\\n\\n' }}"
SIGNS = [
    (QWEN, "hermes", "think"),
    ("{% for tool in tools %}{{ tool }}{% endfor %}<|python_tag|>Environment: ipython", "llama3_json", None),
    ("[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS][TOOL_CALLS]", "mistral", None),
    ("{{ tools }}<|python_start|>[func(a=1)]<|python_end|>", "pythonic", None),
    ("{{ tools }}", "json", None),
    ("{{ messages }}", "hermes", None),
    (None, "hermes", None),
    ("{{ messages }}[THINK][/THINK]", "hermes", "mistral"),
]


@pytest.mark.parametrize(("template", "tools", "reasoning"), SIGNS)
def test_choice_by_the_templates_text(template: str | None, tools: str, reasoning: str | None) -> None:
    form, why = choose_tool_format(template)
    assert form.name == tools
    assert why
    thinking, why = choose_reasoning_format(template)
    assert (thinking and thinking.name) == reasoning
    assert why


@pytest.mark.parametrize(("wanted", "name"), [("mistral", "mistral"), ("qwen25", "hermes"), ("llama3", "llama3_json")])
def test_the_operator_overrules(wanted: str, name: str) -> None:
    assert choose_tool_format(QWEN, wanted)[0].name == name


def test_reasoning_by_name() -> None:
    assert choose_reasoning_format(QWEN, "none")[0] is None
    assert choose_reasoning_format(None, "qwen3")[0] is not None
    chosen = choose_reasoning_format(None, "deepseek_r1")[0]
    assert chosen is not None
    assert chosen.always_open


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match=r"--tool-call-parser xyz.*hermes"):
        choose_tool_format(None, "xyz")
    with pytest.raises(ConfigError, match=r"--reasoning-parser xyz.*think"):
        choose_reasoning_format(None, "xyz")

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from models import ChatTemplate, ChatTemplateError, flatten_content

USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[dict[str, Any]] = USER, **kwargs: Any) -> str:
    return ChatTemplate(source).render(messages, **kwargs)


def test_variables() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{{ messages[0].content }}{{ tools }}{{ add_generation_prompt }}"
        "{{ enable_thinking }}{{ documents }}",
        {"bos_token": "<s>"},
    )
    assert template.render(USER, enable_thinking=False) == "<s>hiNoneTrueFalseNone"
    assert template.render(USER, [{"a": 1}], False) == "<s>hi[{'a': 1}]FalseNone"


def test_blocks_are_trimmed_as_in_transformers() -> None:
    source = "{% for m in messages %}\n    {% if true %}\nA\n    {% endif %}\n{% endfor %}\nB"
    assert render(source) == "A\nB"


def test_loop_controls() -> None:
    source = "{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}"
    source += "{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert render(source) == "02"


def test_generation_mark_is_transparent() -> None:
    assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "ahib"


def test_tojson_keeps_characters() -> None:
    value = {"b": "é<'你&>", "a": 1}
    assert render("{{ v | tojson }}", v=value) == json.dumps(value, ensure_ascii=False)
    assert render("{{ v | tojson(indent=2) }}", v=value) == json.dumps(
        value, ensure_ascii=False, indent=2
    )


def test_strftime_now() -> None:
    assert render("{{ strftime_now('%Y') }}") in {
        str(datetime.datetime.now().year + step) for step in (-1, 0)
    }


def test_raise_exception_carries_the_message() -> None:
    with pytest.raises(ChatTemplateError, match="refused: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.missing.deeper }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ messages.append(1) }}",
        "{{ undefined_function() }}",
    ],
)
def test_failures_become_chat_template_errors(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="the chat template"):
        render(source)


def test_syntax_errors_name_file_and_line() -> None:
    with pytest.raises(ChatTemplateError, match=r"f\.jinja: template 'default' does not.*line 2"):
        ChatTemplate("a\n{% if %}", where="f.jinja")


def test_content_parts_are_flattened() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "x": 1}]
    flat = flatten_content(messages)
    assert flat == [
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": "", "x": 1},
    ]
    assert messages[0]["content"] is parts
    assert render("{{ messages[0].content }}", messages) == "one\ntwo"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "image_url", "image_url": {}}], r"messages\[1\].content: parts of.*'image_url'"),
        ([{"type": "input_audio"}], "'input_audio'"),
        (["text"], "'str'"),
        ([{"type": "text"}], "needs a string in its 'text'"),
        ([{"text": "a"}], "None"),
        (5, "must be a string or a list"),
    ],
)
def test_other_content_is_refused(content: Any, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        render("", [*USER, {"role": "user", "content": content}])


def test_named_templates() -> None:
    template = ChatTemplate({"default": "D", "tool_use": "T", "rag": "R"})
    assert template.names == ("default", "tool_use", "rag")
    assert [template.mentions(text) for text in ("T", "rag")] == [True, False]
    assert template.render(USER) == "D"
    assert template.render(USER, [{"type": "function"}]) == "T"
    assert template.render(USER, [{"type": "function"}], template_name="rag") == "R"
    with pytest.raises(ChatTemplateError, match="no chat template 'x'; this model has default"):
        template.render(USER, template_name="x")


def write(folder: Path, config: dict[str, Any] | None = None, jinja: str | None = None) -> None:
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if jinja is not None:
        (folder / "chat_template.jinja").write_text(jinja)


def test_the_jinja_file_comes_first(tmp_path: Path) -> None:
    write(
        tmp_path, {"chat_template": "config", "eos_token": {"content": "</s>"}}, "{{ eos_token }}"
    )
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None
    assert template.render(USER) == "</s>"


def test_additional_templates(tmp_path: Path) -> None:
    write(tmp_path, jinja="D")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("T")
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None
    assert (template.render(USER), template.render(USER, [{}])) == ("D", "T")


def test_config_string_and_list(tmp_path: Path) -> None:
    write(tmp_path, {"chat_template": "S"})
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None
    assert template.render(USER) == "S"
    entries = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    write(tmp_path, {"chat_template": entries})
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None
    assert (template.render(USER), template.render(USER, [{}])) == ("D", "T")


def test_no_template(tmp_path: Path) -> None:
    assert ChatTemplate.from_folder(tmp_path) is None
    write(tmp_path, {"chat_template": None})
    assert ChatTemplate.from_folder(tmp_path) is None


@pytest.mark.parametrize("value", [5, [{"name": "default"}], ["x"], [{"name": 1, "template": 2}]])
def test_malformed_template_entries(tmp_path: Path, value: Any) -> None:
    write(tmp_path, {"chat_template": value})
    with pytest.raises(ChatTemplateError, match=r"tokenizer_config\.json: chat_template must be"):
        ChatTemplate.from_folder(tmp_path)

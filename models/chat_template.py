"""Chat templates: messages to prompt text, by sandboxed Jinja as transformers renders it."""

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from models.errors import ChatTemplateError
from models.tokenizer import read_tokenizer_config, special_token

TEMPLATE_FILE = "chat_template.jinja"
EXTRA_TEMPLATES = "additional_chat_templates"
DEFAULT = "default"

_SPECIAL_TOKENS = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")


class ChatTemplate:
    """One or more named templates of a model. Rendering changes nothing, so threads may share it.

    `templates` maps names to Jinja sources; `special_tokens` ("bos_token", "eos_token", ...) are
    variables in them; `where` names the file in errors. Raises ChatTemplateError if a source does
    not compile.
    """

    def __init__(
        self,
        templates: str | Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        where: str = "chat template",
    ) -> None:
        sources = {DEFAULT: templates} if isinstance(templates, str) else templates
        environment = _environment()
        self._special_tokens = dict(special_tokens or {})
        self._sources = tuple(sources.values())
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                raise ChatTemplateError(
                    f"{where}: template {name!r} does not compile: {error.message} "
                    f"(line {error.lineno})"
                ) from None

    @classmethod
    def from_folder(cls, folder: Path) -> "ChatTemplate | None":
        """The template of a model folder, or None.

        chat_template.jinja (with additional_chat_templates/NAME.jinja) comes before the
        `chat_template` of tokenizer_config.json, a string or a list of {name, template}.
        """
        config = read_tokenizer_config(folder)
        special = {
            f"{name}_token": text
            for name in _SPECIAL_TOKENS
            if (text := special_token(config, name)) is not None
        }
        file = folder / TEMPLATE_FILE
        if file.is_file():
            extra = sorted((folder / EXTRA_TEMPLATES).glob("*.jinja"))
            sources = {path.stem: _read(path) for path in extra}
            sources[DEFAULT] = _read(file)
            return cls(sources, special, str(file))
        where = str(folder / "tokenizer_config.json")
        templates = _named(config.get("chat_template"), where)
        return cls(templates, special, where) if templates else None

    @property
    def names(self) -> tuple[str, ...]:
        """Names that `render` accepts as `template_name`."""
        return tuple(self._templates)

    def mentions(self, text: str) -> bool:
        """Whether a text stands in the source of any of the templates."""
        return any(text in source for source in self._sources)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_name: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for `messages`. `kwargs` (enable_thinking, ...) are variables of the template.

        Without `template_name`, "tool_use" renders requests with tools if there is such a
        template, else "default" (as transformers chooses). Raises ChatTemplateError with the
        template's own message if it refuses, and for content that is not text.
        """
        template = self._choose(template_name, bool(tools))
        variables = {
            **self._special_tokens,
            "documents": None,
            **kwargs,
            "messages": flatten_content(messages),
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return template.render(variables)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(
                f"the chat template refused: {error.message or error}"
            ) from None
        except Exception as error:  # templates are programs: whatever they do wrong surfaces here
            raise ChatTemplateError(
                f"the chat template failed on these messages: {type(error).__name__}: {error}"
            ) from None

    def _choose(self, name: str | None, with_tools: bool) -> jinja2.Template:
        if name is None:
            name = "tool_use" if with_tools and "tool_use" in self._templates else DEFAULT
        if name not in self._templates:
            raise ChatTemplateError(
                f"there is no chat template {name!r}; this model has {', '.join(self._templates)}"
            )
        return self._templates[name]


def flatten_content(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies messages with each content as one string: text parts joined by newlines, None empty.

    Templates written for strings drop or mangle lists. Raises ChatTemplateError naming the type of
    a part that is not text.
    """
    return [
        {**message, "content": _text(message.get("content"), number)}
        for number, message in enumerate(messages)
    ]


def _text(content: object, number: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    where = f"messages[{number}].content"
    if not isinstance(content, Sequence):
        raise ChatTemplateError(f"{where} must be a string or a list of parts")
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise ChatTemplateError(f"{where}: parts of type {kind!r} are not supported, only text")
        if not isinstance(part.get("text"), str):
            raise ChatTemplateError(f"{where}: a text part needs a string in its 'text'")
        texts.append(part["text"])
    return "\n".join(texts)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ChatTemplateError(f"{file}: cannot be read: {error}") from None


def _named(value: object, where: str) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: value}
    try:
        entries = {entry["name"]: entry["template"] for entry in value}  # type: ignore[attr-defined]
    except (TypeError, KeyError):
        entries = {None: None}
    if not all(isinstance(text, str) for pair in entries.items() for text in pair):
        raise ChatTemplateError(
            f"{where}: chat_template must be a string or a list of objects with name and template"
        )
    return entries


def _environment() -> jinja2.Environment:
    """Options and helpers of transformers `utils/chat_template_utils.py`."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(Extension):
    """`{% generation %}` marks assistant text for training; rendering ignores the mark."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it as an instance attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str, now: Callable[[], datetime.datetime] = datetime.datetime.now) -> str:
    return now().strftime(form)

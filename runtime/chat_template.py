"""Renders chat templates (sandboxed Jinja) with the names and filters that Hugging Face templates rely on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runtime.rejection import words_of


class _GenerationTag(Extension):
    """Renders `{% generation %}...{% endgeneration %}`, a mark for training, as what stands between."""

    tags = {"generation"}

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


def compile_template(source: str) -> Any:
    """Compile a template in a sandbox that lets it neither reach Python objects nor change its arguments.

    Raises:
        ValueError: a syntax error in the template; one line.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ValueError(f"the model's chat template is invalid: {words_of(error)}") from None


def render_chat(template: Any, names: Mapping[str, Any]) -> str:
    """Render a compiled template with `names`, which hold at least `messages` and `add_generation_prompt`.

    Raises:
        ValueError: there is no message, or the template refuses them; one line.
    """
    if not names["messages"]:
        raise ValueError("messages is empty; send at least one message")
    for at, message in enumerate(names["messages"]):
        if not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{at}] has no role; send {{'role': ..., 'content': ...}}")
    try:
        return str(template.render(**names))
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"the model's chat template refuses these messages: {words_of(error)}") from None


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which would change what the model reads.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)

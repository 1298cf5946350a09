"""The page at `/docs`: the OpenAPI document for people, without scripts or anything from another host."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font-family: ui-monospace, monospace; font-size: 0.9em; }
pre { overflow: auto; max-height: 30rem; padding: 0.75rem; border: 1px solid #8886; }
details { margin: 0.25rem 0; } summary { cursor: pointer; } h2 { margin-top: 2rem; }
"""


def docs_page(document: Mapping[str, Any]) -> str:
    """HTML of an OpenAPI document: its routes by group, then its schemas."""
    info = document["info"]
    title = escape(f"{info['title']} {info['version']}")
    groups: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            tag = (operation.get("tags") or ["server"])[0]
            groups.setdefault(tag, []).append(_operation(method, path, operation))
    schemas = document.get("components", {}).get("schemas", {})
    parts = [
        f"<h1>{title}</h1><p>{escape(info.get('description', ''))}</p>",
        '<p>The same for programs: <a href="openapi.json">openapi.json</a></p>',
        *(f"<h2>{escape(tag)}</h2>{''.join(entries)}" for tag, entries in groups.items()),
        "<h2>schemas</h2>",
        *(
            f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>{_json(schema)}</details>'
            for name, schema in schemas.items()
        ),
    ]
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
    return f"{head}<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>"


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> str:
    named = sorted(set(_schema_names(operation)))
    links = ", ".join(f'<a href="#{escape(name)}">{escape(name)}</a>' for name in named)
    return (
        f"<p><code><b>{method.upper()}</b> {escape(path)}</code> &mdash; {escape(operation.get('summary', ''))}"
        f"{f'<br>{links}' if links else ''}</p>"
    )


def _schema_names(part: Any) -> Iterable[str]:
    """Names of the schemas that a part of the document refers to."""
    if isinstance(part, Mapping):
        reference = part.get("$ref")
        if isinstance(reference, str):
            yield reference.rsplit("/", 1)[-1]
        for value in part.values():
            yield from _schema_names(value)
    elif isinstance(part, list):
        for value in part:
            yield from _schema_names(value)


def _json(schema: Any) -> str:
    return f"<pre>{escape(json.dumps(schema, indent=2, ensure_ascii=False))}</pre>"

"""The HTTP application over one runtime: inference, control, metrics and health, each behind the key it needs."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterable, Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from fastapi import Depends, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse
from pydantic import BaseModel

from runtime.http_connection import BodyLimit
from runtime.http_control import Lifecycle, control_router, snapshots_router
from runtime.http_errors import ERROR_RESPONSES, InternalErrors, install_error_handlers
from runtime.http_events import EventHub
from runtime.http_openai import openai_router
from runtime.http_security import Keys, LoopbackHostCheck, require_inference
from runtime.instance import is_loopback
from runtime.interface import EngineState, Runtime, RuntimeUnavailable

if TYPE_CHECKING:
    from runtime.listener import ServerSettings
    from runtime.metrics import Metrics

SERVING = (EngineState.READY, EngineState.DEGRADED)
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font-family: ui-monospace, monospace; font-size: 0.9em; }
pre { overflow: auto; max-height: 30rem; padding: 0.75rem; border: 1px solid #8886; }
details { margin: 0.25rem 0; } summary { cursor: pointer; } h2 { margin-top: 2rem; }
"""


class Alive(BaseModel):
    status: str = "alive"


class Ready(BaseModel):
    status: str
    reason: str


def create_app(
    runtime: Runtime,
    keys: Keys,
    settings: ServerSettings,
    *,
    hub: EventHub | None = None,
    lifecycle: Lifecycle | None = None,
    metrics: Metrics | None = None,
) -> FastAPI:
    """The application over `runtime`, which stays the caller's to close.

    Args:
        hub: fans the runtime's events out; the caller closes the one it gives, before the server stops.
        lifecycle: what drains, stops and restarts this process; None where it takes no such orders.
        metrics: None leaves out `/metrics`.
    """
    app = FastAPI(
        title="ddtree",
        version=_version(),
        description="Speculative decoding with draft trees, behind the OpenAI-compatible API.",
        docs_url=None,
        redoc_url=None,
        responses=ERROR_RESPONSES,
    )
    install_error_handlers(app)
    app.include_router(openai_router(runtime, settings), dependencies=[Depends(require_inference(keys))])
    app.include_router(control_router(runtime, keys, hub or EventHub(runtime), lifecycle))
    app.include_router(snapshots_router(runtime, keys))
    _add_health(app, runtime)
    if metrics is not None:
        from runtime.metrics import metrics_router

        guards = [] if is_loopback(settings.host) else [Depends(require_inference(keys))]
        app.include_router(metrics_router(metrics), dependencies=guards)
    _add_middleware(app, settings)
    return app


def _version() -> str:
    try:
        return importlib.metadata.version("ddtree-console")
    except importlib.metadata.PackageNotFoundError:  # run from a source folder
        return "unknown"


def _add_health(app: FastAPI, runtime: Runtime) -> None:
    @app.get("/health", tags=["health"], summary="The process is alive")
    async def health() -> Alive:
        return Alive()

    @app.get("/ready", tags=["health"], summary="Requests are served; 503 with the reason where they are not")
    async def ready() -> Ready:
        status = await runtime.status()
        if status.state not in SERVING:
            raise RuntimeUnavailable(f"the engine is {status.state.value}: {status.reason}")
        return Ready(status=status.state.value, reason=status.reason)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(docs_page(app.openapi()))


def _add_middleware(app: FastAPI, settings: ServerSettings) -> None:
    """The last one added sees a request first."""
    app.add_middleware(InternalErrors)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["retry-after", "x-request-id"],
        )
    if is_loopback(settings.host):
        app.add_middleware(LoopbackHostCheck)


def docs_page(document: Mapping[str, Any]) -> str:
    """HTML of an OpenAPI document: its routes by group, then its schemas; no scripts, nothing from another host."""
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

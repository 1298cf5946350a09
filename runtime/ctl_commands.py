"""`ddtree ctl`: steers a running runtime from the shell, over the same API a console uses; loads no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import typer

from runtime.command_options import Json, Url, emit_json, read_only, tell

if TYPE_CHECKING:
    from runtime.http_client import HttpRuntime
    from runtime.instance import Instance
    from runtime.interface import ChangePlan, ChangeReport, Status

ctl_app = typer.Typer(
    help="Steer a running runtime: status, changes, requests, drain, stop, restart.", no_args_is_help=True
)

NoWait = Annotated[bool, typer.Option("--no-wait", help="Return as soon as the server has agreed.")]
Settings = Annotated[list[str], typer.Argument(metavar="KEY=VALUE...", help="Settings, as tree_budget=16.")]

FAILED, REFUSED = 1, 3
POLL_S = 0.2
T = TypeVar("T")


@ctl_app.command()
def status(url: Url = None, json: Json = False) -> None:
    """Show state, settings, load and the last change on one screen."""

    async def act(runtime: HttpRuntime) -> None:
        from runtime.ctl_text import status_lines
        from runtime.interface import RuntimeUnavailable

        now = await runtime.status()
        try:
            description = await runtime.describe()
            requests = await runtime.requests()
        except RuntimeUnavailable:  # loading: the status says so
            description, requests = None, ()
        if json:
            emit_json(
                {
                    "url": runtime.url,
                    "status": now.model_dump(mode="json"),
                    "description": description and description.model_dump(mode="json"),
                    "requests": [each.model_dump(mode="json") for each in requests],
                }
            )
            return
        for line in status_lines(runtime.url, description, now, requests):
            print(line)

    _with_runtime(url, act)


@ctl_app.command()
def plan(settings: Settings, url: Url = None, json: Json = False) -> int:
    """Show what a change would do; nothing is changed. Exit code 3 if it would be refused."""
    change = _change(settings)

    async def act(runtime: HttpRuntime) -> int:
        return _show_plan(await runtime.preview(change), json)

    return _with_runtime(url, act)


@ctl_app.command("apply")
def apply_change(
    settings: Settings,
    revision: Annotated[
        int | None, typer.Option(metavar="N", help="Refuse if the configuration is not at this revision.")
    ] = None,
    url: Url = None,
    json: Json = False,
) -> int:
    """Apply a change; refused if somebody else changed the configuration in between."""
    change = _change(settings)
    _refuse_read_only()

    async def act(runtime: HttpRuntime) -> int:
        return await _apply(runtime, change, revision, json)

    return _with_runtime(url, act)


@ctl_app.command()
def undo(
    revision: Annotated[
        int | None, typer.Option(metavar="N", help="Undo the change that led to this revision.")
    ] = None,
    url: Url = None,
    json: Json = False,
) -> int:
    """Revert the last change, whoever made it; refused if a later one touched the same field."""
    _refuse_read_only()

    async def act(runtime: HttpRuntime) -> int:
        from runtime.changes import described, reverting

        now = await runtime.status()
        found = reverting(now.history, revision)
        if isinstance(found, str):
            tell(f"not undone: {found}")
            return REFUSED
        if not json:
            print(f"undoing: {described(found)}")
        change = {each.field: each.old for each in found.changes}
        return await _apply(runtime, change, now.revision, json)

    return _with_runtime(url, act)


@ctl_app.command()
def requests(url: Url = None, json: Json = False) -> None:
    """List the requests that run or wait, then those that ended lately."""

    async def act(runtime: HttpRuntime) -> None:
        from runtime.ctl_text import request_lines

        found = await runtime.requests()
        if json:
            emit_json({"results": [each.model_dump(mode="json") for each in found]})
            return
        for line in request_lines(found):
            print(line)

    _with_runtime(url, act)


@ctl_app.command()
def cancel(
    request_id: Annotated[str, typer.Argument(metavar="ID")], url: Url = None, json: Json = False
) -> int:
    """End one request; its client gets the text so far."""
    _refuse_read_only()

    async def act(runtime: HttpRuntime) -> int:
        done = await runtime.cancel(request_id)
        if json:
            emit_json({"request_id": request_id, "cancelled": done})
        elif done:
            print(f"cancelled {request_id}")
        if not done:
            tell(f"{request_id}: no such request runs or waits")
        return 0 if done else REFUSED

    return _with_runtime(url, act)


@ctl_app.command()
def drain(no_wait: NoWait = False, url: Url = None, json: Json = False) -> None:
    """Take no more requests and finish those that run; the process stays."""
    _refuse_read_only()
    _with_runtime(url, lambda runtime: _order(runtime, "drain", None if no_wait else _drained, json))


@ctl_app.command()
def stop(no_wait: NoWait = False, url: Url = None, json: Json = False) -> None:
    """Drain, then end the process; returns when it is gone."""
    _refuse_read_only()
    _with_runtime(url, lambda runtime: _order(runtime, "stop", None if no_wait else _gone, json))


@ctl_app.command()
def restart(no_wait: NoWait = False, url: Url = None, json: Json = False) -> None:
    """Drain, then start anew with the same command line; returns when it serves again."""
    _refuse_read_only()
    _with_runtime(url, lambda runtime: _order(runtime, "restart", None if no_wait else _back, json))


@ctl_app.command()
def watch(url: Url = None, json: Json = False) -> None:
    """Print changes, requests, log lines and speed as they happen, until interrupted; --json: one object a line."""

    async def act(runtime: HttpRuntime) -> None:
        from runtime.ctl_text import RoundMeter, watch_line
        from runtime.interface import RoundStats

        meter = RoundMeter()
        async for event in runtime.watch():
            if json:
                emit_json(event.model_dump(mode="json"))
                continue
            line = meter.add(event) if isinstance(event, RoundStats) else watch_line(event)
            if line is not None:
                print(line, flush=True)

    _with_runtime(url, act)


def _with_runtime(url: str | None, act: Callable[[HttpRuntime], Awaitable[T]]) -> T:
    """Runs `act` on the server at `url`, or on the one running instance of this user."""
    from runtime.connect import attach
    from runtime.instance import runtime_folder, the_instance

    runtime = attach(url or the_instance(runtime_folder()).url)

    async def run() -> T:
        try:
            return await act(runtime)
        finally:
            await runtime.aclose()

    return asyncio.run(run())


def _refuse_read_only() -> None:
    if read_only():
        from runtime.http_client import Refused

        raise Refused("refused: DDTREE_READ_ONLY is set")


def _change(settings: list[str]) -> dict[str, Any]:
    change: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        name = name.strip()
        if not equals or not name:
            raise typer.BadParameter(
                f"{setting!r} is not KEY=VALUE, as tree_budget=16", param_hint="KEY=VALUE"
            )
        if name in change:
            raise typer.BadParameter(f"{name} is given twice", param_hint="KEY=VALUE")
        change[name] = value.strip()
    return change


def _show_plan(found: ChangePlan, json: bool) -> int:
    from runtime.ctl_text import plan_lines

    if json:
        emit_json({"plan": found.model_dump(mode="json")})
    else:
        for line in plan_lines(found):
            print(line)
    if not found.allowed or not found.changes:
        tell(found.summary)
    return 0 if found.allowed else REFUSED


async def _apply(runtime: HttpRuntime, change: dict[str, Any], revision: int | None, json: bool) -> int:
    from runtime.connect import author

    found = await runtime.preview(change)
    if not found.allowed:
        return _show_plan(found, json)
    report = await runtime.apply(change, found.revision if revision is None else revision, author("ctl"))
    _show_report(report, json)
    return FAILED if report.failure else 0


def _show_report(report: ChangeReport, json: bool) -> None:
    from runtime.ctl_text import clip

    if json:
        emit_json({"report": report.model_dump(mode="json")})
    else:
        print(clip(f"{report.summary} (revision {report.revision})"))
        if report.kept is not None:
            print(clip(report.kept))


Wait = Callable[["Server"], Awaitable[None]]


class Server(NamedTuple):
    """A server that was given an order, as it was before."""

    runtime: HttpRuntime
    before: Status
    instance: Instance | None
    """None: it is not one of this user's on this host."""


async def _order(runtime: HttpRuntime, what: str, wait: Wait | None, json: bool) -> None:
    """Gives an order, says what the server answered, waits for the end of it."""
    from runtime.instance import instances, runtime_folder

    found = next((each for each in instances(runtime_folder()) if each.serves(runtime.url)), None)
    server = Server(runtime, await runtime.status(), found)
    answer = await runtime.order(what)
    if not json:
        print(answer, flush=True)
    if wait is not None:
        await wait(server)
    if json:
        emit_json({"order": what, "answer": answer, "complete": wait is not None})


async def _drained(server: Server) -> None:
    while True:
        now = await server.runtime.status()
        if not now.running + now.waiting:
            return
        await asyncio.sleep(POLL_S)


async def _gone(server: Server) -> None:
    while server.instance.alive if server.instance else await _answers(server):
        await asyncio.sleep(POLL_S)


async def _back(server: Server) -> None:
    from runtime.interface import RuntimeUnavailable

    while not await _answers(server, since_s=server.before.started_at_s):
        if server.instance is not None and not server.instance.alive:
            raise RuntimeUnavailable(f"{server.runtime.url} ended and did not come back; its log says why")
        await asyncio.sleep(POLL_S)


async def _answers(server: Server, since_s: float | None = None) -> bool:
    """Whether there is a server; with `since_s`, whether one that started later has loaded."""
    from runtime.interface import EngineState, RuntimeUnavailable

    try:
        now = await server.runtime.status()
    except RuntimeUnavailable:
        return False
    if since_s is None:
        return True
    return (now.started_at_s or 0.0) > since_s and now.state is not EngineState.LOADING

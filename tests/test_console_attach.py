"""A console beside others: what it shows of the server, of others' changes, and what leaving it means."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import pytest
from console_driver import Driven
from fake_runtime import FakeRuntime
from http_serving import OPERATOR, served
from test_runtime_contract import settle
from textual.message import Message
from textual.widgets import Static

from console import messages
from console.app import ConsoleApp, Ending
from console.bridge import Bridge
from console.dialogs import LeaveDialog
from console.frame import Place
from runtime.http_client import HttpRuntime
from runtime.interface import GenerateRequest

AT = "http://127.0.0.1:8642"


@asynccontextmanager
async def console(
    place: Place, runtime: FakeRuntime | None = None, **options: object
) -> AsyncIterator[Driven]:
    runtime = runtime or FakeRuntime()
    app = ConsoleApp(runtime, place=place, author="console 1 of ann@a", **options)  # type: ignore[arg-type]
    async with app.run_test(size=(100, 30)) as pilot:
        driven = Driven(app, runtime, pilot)
        await driven.until(lambda: app.view.description is not None, "a description arrived")
        yield driven
        app.exit(Ending.QUIT)
        await pilot.pause()


async def test_of_two_consoles_that_change_from_one_revision_one_is_told_who_was_first() -> None:
    runtime = FakeRuntime()
    posted: dict[str, list[Message]] = {"ann": [], "bob": []}
    async with served(runtime) as url:
        attached = {who: HttpRuntime(url, OPERATOR) for who in posted}
        bridges = {who: Bridge(attached[who], posted[who].append, f"console of {who}") for who in posted}
        running = [asyncio.create_task(bridge.run()) for bridge in bridges.values()]
        await settle(lambda: all(bridge._seen is not None for bridge in bridges.values()))
        await asyncio.gather(
            bridges["ann"].change(lambda config: {"tree_budget": 16}),
            bridges["bob"].change(lambda config: {"tree_budget": 24}),
        )
        done = [who for who in posted if of(posted[who], messages.ChangeDone)]
        assert len(done) == 1
        winner, other = done[0], "bob" if done[0] == "ann" else "ann"
        (refused,) = of(posted[other], messages.ChangeRefused)
        budget = runtime.config.tree_budget
        assert f"console of {winner} set tree_budget 11 -> {budget} at " in refused.text
        await settle(lambda: bridges[other]._seen.config["tree_budget"] == budget)  # type: ignore[union-attr]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for each in attached.values():
            await each.aclose()


def of(posted: list[Message], kind: type) -> list:
    return [message for message in posted if isinstance(message, kind)]


async def test_a_change_of_somebody_else_is_told_with_who_and_when() -> None:
    async with console(Place(attached_to=AT)) as driven:
        await driven.runtime.apply({"mode": "chain"}, 1, "console 2 of bob@b")
        await driven.until(
            lambda: "console 2 of bob@b set mode tree -> chain at " in driven.app.view.notice, "told"
        )
        assert "mode chain" in driven.text("#facts")


async def test_an_attached_console_says_where_and_asks_only_for_its_own_answer() -> None:
    runtime = FakeRuntime(answer="word " * 400)
    async with console(Place(attached_to=AT), runtime) as driven:
        assert "attached to fake" in driven.text("#where")
        await driven.until(
            lambda: "of the server" in str(driven.app.screen.query_one("#host").border_title), "host"
        )
        others = runtime.generate(GenerateRequest(prompt="x"))
        await anext(others)
        await driven.until(lambda: driven.running == 1, "another client's request")
        assert driven.app._would_lose() == ""
        await driven.ask("hello")
        assert "1 request is not finished" in driven.app._would_lose()
        await others.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize(
    ("key", "ending"), [("d", Ending.DETACH), ("s", Ending.QUIT), ("escape", None), ("enter", None)]
)
async def test_a_console_that_serves_asks_what_becomes_of_the_runtime(
    key: str, ending: Ending | None, busy: bool
) -> None:
    runtime = FakeRuntime(answer="word " * 400)
    async with AsyncExitStack() as stack:
        driven = await stack.enter_async_context(console(Place(listens_at=AT), runtime))
        assert "serves 127.0.0.1:8642" in driven.text("#where")
        if busy:
            others = await stack.enter_async_context(aclosing(runtime.generate(GenerateRequest(prompt="x"))))
            await anext(others)
            await driven.until(lambda: driven.running == 1, "another client's request")
        await driven.press("q")
        await driven.until(lambda: isinstance(driven.app.screen, LeaveDialog), "asked")
        await driven.until(lambda: "Leave the screen?" in driven.shown(), "drawn")
        effect = "".join(str(part.render()) for part in driven.app.screen.query(Static))
        assert ("1 request is not finished" in effect) is busy
        await driven.press(key)
        if ending is None:
            await driven.until(lambda: not isinstance(driven.app.screen, LeaveDialog), "stays")
            assert driven.app.return_value is None
        else:
            await driven.until(lambda: driven.app.return_value is ending, "left")


async def test_a_lost_server_stands_in_the_header_with_its_time() -> None:
    async with console(Place(attached_to=AT)) as driven:
        driven.app.post_message(
            messages.BridgeProblem("lost since 12:34:56: http://127.0.0.1:8642: it broke")
        )
        await driven.until(lambda: "lost since 12:34:56" in driven.text("#state"), "header")
        assert "it broke" in driven.text("#notice")
        await driven.until(lambda: "n/a now" in driven.text("#speed"), "nothing is said to be idle")
        assert "as last told: 0 running" in driven.text("#host") and "idle" not in driven.text("#speed")


async def test_a_status_that_a_change_has_overtaken_is_not_shown() -> None:
    """Else the next key would be counted from what was in force before the last one."""
    runtime = FakeRuntime()
    posted: list[messages.StatusArrived] = []
    bridge = Bridge(runtime, posted.append, "console")
    now = await runtime.status()
    bridge._show(now.model_copy(update={"revision": 4}))
    bridge._show(now.model_copy(update={"revision": 3}))
    assert [each.status.revision for each in posted] == [4]
    restarted = now.model_copy(update={"revision": 1, "started_at_s": (now.started_at_s or 0.0) + 9})
    bridge._show(restarted)
    assert [each.status.revision for each in posted] == [4, 1]

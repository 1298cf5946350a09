"""The doctor's panel: opened by key and from the palette, findings with what to do, and text that cannot style it."""

from __future__ import annotations

from console_driver import console
from fake_runtime import EXAMINED, FakeRuntime

from console.doctor_screen import DoctorScreen, findings_text
from runtime.jobs import Outcome


async def test_the_log_screens_key_shows_what_was_found_and_what_to_do():
    async with console(size=(80, 24)) as driven:
        await driven.press("8", "d")
        await driven.until(lambda: isinstance(driven.app.screen, DoctorScreen), "panel")
        await driven.until(lambda: "1 to look at" in driven.text("#doctor_title"), "findings")
        shown = driven.shown()
        for words in ("warning  logout", "[red]me[/red] ends at logout", "do: loginctl enable-linger me"):
            assert words in shown
        assert "ddtree doctor --fix" in shown and "ok       gpu-driver" in shown
        assert max(map(len, shown.splitlines())) <= 80
        found = {"checks": [EXAMINED["checks"][1]]}
        driven.runtime.job_results["doctor"] = Outcome("1 checks, none to look at", found)
        await driven.press("r")
        await driven.until(lambda: "none to look at" in driven.text("#doctor_title"), "again")
        await driven.press("j", "k", "escape")
        await driven.until(lambda: not isinstance(driven.app.screen, DoctorScreen), "closed")


async def test_a_read_only_console_may_look_and_a_refusal_is_told():
    runtime = FakeRuntime()
    runtime.job_board._kinds.pop("doctor")
    async with console(runtime, read_only=True) as driven:
        await driven.app.run_action("doctor")
        await driven.until(lambda: "does not offer it" in driven.shown(), "refused in words")


def test_a_finding_that_needs_nothing_done_says_only_what_was_found():
    text = str(findings_text({"checks": [EXAMINED["checks"][1]]}))
    assert "no NVIDIA GPU here" in text and "do:" not in text and "expected" not in text

"""Screen 5 by keys over a real store: save, list, page, difference, filter, rollback with its verdict, verify."""

from __future__ import annotations

import asyncio
import re
import subprocess
from pathlib import Path

import pytest
from console_driver import Driven, console
from fake_runtime import FakeRuntime
from test_console_tmux import fake, needs_tmux
from test_console_tmux import tmux as tmux
from textual.widgets import Button, Input
from tiny_models import prompt_of, tiny_config
from tmux_window import Tmux

from console.archive import Archive
from console.snapshots_dialogs import NoteArea, PageDialog, RollbackDialog, SaveDialog
from console.snapshots_rows import graph
from console.snapshots_screen import SnapshotList, SnapshotsScreen
from runtime.config import RuntimeConfig
from snapshots.content import Snapshot
from snapshots.message import Entry
from snapshots.store import Store

EVIL = "[red]x[/] \x1b[31m\u202eevil #1 best\t"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hashes of installed files, read once for all tests here."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> Path:
    """Where the store of a test will be."""
    for name in ("DATA", "STATE", "CONFIG"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return tmp_path / "data" / "ddtree" / "snapshots"


def put(store: Path, *labels: str) -> None:
    """Snapshots made elsewhere, oldest first."""
    for label in labels:
        Store.at(store).save(Snapshot(config={"mode": "tree", "tree_budget": 11}, label=label))


async def save(driven: Driven, label: str, note: str = "") -> None:
    await driven.press("s")
    assert isinstance(driven.app.screen, SaveDialog)
    driven.app.screen.query_one("#label", Input).value = label
    driven.app.screen.query_one(NoteArea).text = note
    await driven.press("enter")
    await driven.until(lambda: "saved " in driven.app.view.notice, "saved")
    await driven.until(lambda: not isinstance(driven.app.screen, SaveDialog), "dialog gone")


async def listed(driven: Driven, *labels: str) -> None:
    await driven.press("5")
    await driven.until(lambda: rows(driven) == list(labels), f"rows {labels}")


def rows(driven: Driven) -> list[str]:
    return [entry.label for entry in driven.app.snapshots._entries]


async def reads(driven: Driven, *words: str) -> str:
    """Waits until all `words` stand on the screen, over the end of a line too; returns the screen."""

    def there() -> bool:
        shown = driven.shown()
        wrapped = shown + " ".join(shown.split())
        return all(word in wrapped for word in words)

    await driven.until(there, f"{words} shown")
    return driven.shown()


async def test_save_flip_to_worse_diff_and_roll_back_to_the_first_by_keys(store: Path) -> None:
    runtime = FakeRuntime(RuntimeConfig(mode="tree", tree_budget=11), round_s=0.001)
    async with console(runtime, size=(80, 24)) as driven:
        await save(driven, "fast tree", "measured on a quiet host")
        await driven.press("m", "m")
        await driven.until(lambda: runtime.config.mode == "off", "worse setting")
        await driven.until(lambda: driven.app.view.config.get("mode") == "off", "seen")
        await save(driven, "plain")
        await listed(driven, "plain", "fast tree")

        await driven.press("d")
        await driven.until(lambda: isinstance(driven.app.screen, PageDialog), "difference")
        shown = await reads(driven, "fast tree  ->  plain", "settings", "results")
        assert re.search(r"mode +tree +off", shown)
        await driven.press("escape", "j", "r")
        await driven.until(lambda: isinstance(driven.app.screen, RollbackDialog), "preview")
        await reads(driven, "mode: off -> tree", "Cancel", "Roll back")
        assert isinstance(driven.app.focused, Button) and driven.app.focused.id == "no"
        await driven.press("enter")
        await driven.until(lambda: isinstance(driven.app.screen, SnapshotsScreen), "cancelled")
        assert runtime.config.mode == "off"

        await driven.press("r")
        await driven.until(lambda: isinstance(driven.app.screen, RollbackDialog), "preview again")
        await driven.press("y")
        await driven.until(lambda: runtime.config.mode == "tree", "applied")
        await driven.until(lambda: "rolled back to" in driven.app.view.notice, "told")
        await reads(driven, "cannot tell whether the figures are back:", "the snapshot has none; now")
        await driven.until(lambda: rows(driven)[0] == "rollback to fast tree", "listed")
        shown = await reads(driven, "↩", "│", "╯")
        assert runtime.config.tree_budget == 11
    log = subprocess.run(
        ["git", "-C", str(store), "log", "--format=%s"], capture_output=True, text=True, check=True
    )
    assert "rollback to fast tree" in log.stdout and "fast tree" in log.stdout


async def test_the_verdict_compares_what_was_measured_then_and_after(store: Path) -> None:
    runtime = FakeRuntime(round_s=0.001)
    async with console(runtime) as driven:
        await save(driven, "first")
        await listed(driven, "first")
        for _ in range(2):  # the first one measures; the second has figures to compare with
            await driven.press("m", "m")
            await driven.until(lambda: runtime.config.mode == "off", "flipped")
            await driven.press("g", "r")
            await driven.until(lambda: isinstance(driven.app.screen, RollbackDialog), "preview")
            await driven.press("y")
            await driven.until(lambda: "rolled back to" in driven.app.view.notice, "told")
            said = driven.text("#verdict")
            assert runtime.config.mode == "tree"
            await driven.until(lambda: rows(driven)[0].startswith("rollback to"), "listed")
            driven.app._notice("read")
        assert "figures are back" in said or "figures are not back" in said
        assert "tok/s" in said
        await driven.press("g", "v")
        await driven.until(lambda: "figures are back" in driven.text("#verdict"), "verified")
        await driven.press("m", "m")
        await driven.until(lambda: runtime.config.mode == "off", "other settings")
        await driven.press("v")
        await driven.until(lambda: "other settings run: mode off here" in driven.app.view.notice, "refused")


async def test_by_keys_over_a_real_engine_text_and_configuration_are_those_of_the_snapshot(
    store: Path, tiny_folder: Path
) -> None:
    from runtime.interface import GenerateRequest, RequestFinished, SamplingParams
    from runtime.local import LocalRuntime

    config = tiny_config(
        tiny_folder / "target", tiny_folder / "drafter", mode="tree", tree_budget=7, auto_snapshot=False
    )
    runtime = LocalRuntime(config)

    async def text() -> str:
        sampling = SamplingParams(max_tokens=24, temperature=0.7, seed=11)
        request = GenerateRequest(prompt_token_ids=prompt_of(9), sampling=sampling)
        ends = [event async for event in runtime.generate(request) if isinstance(event, RequestFinished)]
        return ends[0].text

    async def settings() -> tuple[object, object]:
        now = (await runtime.status()).config
        return now["mode"], now["tree_budget"]

    await runtime.wait_ready()
    try:
        async with console(runtime) as driven:
            await driven.until(lambda: driven.app.view.config.get("mode") == "tree", "ready")
            before = await text()
            await save(driven, "first")
            for _ in range(2):  # the first one measures; the second has figures to compare with
                await driven.press("m", "m")
                await driven.until(lambda: driven.app.view.config.get("mode") == "off", "worse setting")
                assert await settings() == ("off", 7)
                await driven.press("5", "g")
                await driven.until(lambda: bool(rows(driven)), "listed")
                await driven.press("r")
                await driven.until(lambda: isinstance(driven.app.screen, RollbackDialog), "preview")
                await driven.press("y")
                await driven.until(lambda: "rolled back to" in driven.app.view.notice, "told")
                said = driven.text("#verdict")
                await driven.until(lambda: rows(driven)[0].startswith("rollback to"), "listed")
                driven.app._notice("read")
            assert await settings() == ("tree", 7)
            assert await text() == before
            assert re.search(r"figures are (not )?back: .*tok/s", " ".join(said.split()))
    finally:
        await runtime.aclose()


@pytest.mark.case("D8")
async def test_notes_come_back_verbatim_and_no_text_styles_the_screen(store: Path) -> None:
    note = "#1 best\n\n  two spaces  \nKey: value\n-dash \U0001f680 " + "x" * 300
    async with console() as driven:
        await save(driven, "[red]x[/] evil", note)
        await listed(driven, "[red]x[/] evil")
        await reads(driven, "[red]x[/] evil", "#1 best")
        await driven.press("enter")
        await driven.until(lambda: isinstance(driven.app.screen, PageDialog), "page")
        assert "Key: value" in await reads(driven, "#1 best", "  two spaces", "-dash")
        await driven.press("escape")
        await driven.press("s")
        await driven.until(lambda: isinstance(driven.app.screen, SaveDialog), "dialog")
        driven.app.screen.query_one(NoteArea).text = EVIL
        await driven.press("ctrl+s")
        await driven.until(lambda: len(rows(driven)) == 2, "saved")
        assert "\x1b" not in driven.shown() and "\u202e" not in driven.shown()
    assert Store.at(store).list().entries[1].note == note
    assert Store.at(store).list().entries[0].note == EVIL


async def test_a_secret_in_the_note_keeps_the_dialog_and_the_words_also_when_it_is_left(store: Path) -> None:
    async with console() as driven:
        await driven.press("s")
        note = "works\nHF_TOKEN=hf_" + "a1" * 17
        driven.app.screen.query_one(NoteArea).text = note
        await driven.press("ctrl+s")
        await driven.until(lambda: "note line 2" in driven.text("#wrong"), "refused by line")
        assert driven.app.screen.query_one(NoteArea).text == note
        await driven.press("escape")
        assert not isinstance(driven.app.screen, SaveDialog)
        await driven.press("s")
        assert driven.app.screen.query_one(NoteArea).text == note, "kept for the next try"
        driven.app.screen.query_one(NoteArea).text = "works"
        await driven.press("ctrl+s")
        await driven.until(lambda: "saved " in driven.app.view.notice, "saved")
        await driven.press("s")
        assert driven.app.screen.query_one(NoteArea).text == ""
    assert [entry.note for entry in Store.at(store).list().entries] == ["works"]


async def test_enter_pressed_again_while_a_save_begins_saves_once(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, save = asyncio.Event(), Archive.save

    async def late(archive: Archive, label: str, note: str) -> Entry:
        await goes_on.wait()
        return await save(archive, label, note)

    monkeypatch.setattr(Archive, "save", late)
    async with console() as driven:
        await driven.press("s", *"once", "enter", "enter")
        await reads(driven, "a save is running; wait for it")
        await driven.press("ctrl+s", "escape", "s", *"other", "enter")
        await reads(driven, "a save is running; wait for it")
        await driven.press("escape")
        goes_on.set()
        await driven.until(lambda: "saved " in driven.app.view.notice, "saved")
        await listed(driven, "once")
        await driven.press("s")
        assert driven.app.screen.query_one("#label", Input).value.endswith("other"), "it was not saved yet"
    assert [entry.label for entry in Store.at(store).list().entries] == ["once"]


async def test_the_filter_narrows_and_escape_shows_all(store: Path) -> None:
    put(store, "one tree", "two plain", "three tree")
    async with console(size=(80, 24)) as driven:
        await listed(driven, "three tree", "two plain", "one tree")
        await driven.press("slash", *"plain", "enter")
        await driven.until(lambda: rows(driven) == ["two plain"], "filtered")
        await reads(driven, "filter: plain")
        await driven.press("d")
        await driven.until(lambda: "nothing to compare" in driven.app.view.notice, "one alone")
        await driven.press("escape")
        await driven.until(lambda: len(rows(driven)) == 3, "all")
        await driven.press("slash", *"zzz")
        await reads(driven, "no snapshot holds these words")


async def test_a_read_only_console_reads_and_refuses_the_rest(store: Path) -> None:
    put(store, "kept")
    async with console(read_only=True) as driven:
        await listed(driven, "kept")
        for key in ("s", "r", "v"):
            await driven.press(key)
            await driven.until(lambda: "read-only" in driven.app.view.notice, key)
            assert isinstance(driven.app.screen, SnapshotsScreen)
            driven.app._notice("read")
        await driven.press("enter")
        await driven.until(lambda: isinstance(driven.app.screen, PageDialog), "page")


async def test_what_is_not_pushed_stands_in_list_and_header(store: Path, tmp_path: Path) -> None:
    put(store, "first")
    subprocess.run(["git", "init", "-q", "--bare", str(tmp_path / "remote.git")], check=True)
    subprocess.run(
        ["git", "-C", str(store), "config", "remote.origin.url", str(tmp_path / "remote.git")], check=True
    )
    async with console() as driven:
        await listed(driven, "first")
        await driven.until(lambda: "not pushed: 1" in driven.text("#where"), "header")
        assert "not pushed: 1" in driven.text("#store_line")


async def test_an_empty_or_broken_store_is_told_in_words(store: Path) -> None:
    async with console(size=(80, 24)) as driven:
        await driven.press("5")
        await reads(driven, "no snapshot yet; s saves what runs")
        await driven.press("r", "d", "v", "enter", "space")
        await driven.until(lambda: "no snapshot" in driven.app.view.notice, "told")
        store.parent.mkdir(parents=True)
        store.write_text("no folder")
        await driven.press("f5")
        await driven.until(lambda: driven.app.view.notice_bad, "broken")


async def test_the_list_fetches_older_snapshots_as_it_is_walked(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store.list, "__defaults__", ("", 0, 4))
    put(store, *(f"s{number}" for number in range(6)))
    async with console() as driven:
        await driven.press("5")
        await driven.until(lambda: len(rows(driven)) == 6, "all")
        await driven.press("G")
        await driven.until(lambda: driven.app.snapshots.query_one(SnapshotList).highlighted == 5, "last")


@needs_tmux
def test_save_flip_and_roll_back_in_a_real_terminal(tmux: Tmux, store: Path, cache: Path) -> None:
    folders = f"env XDG_DATA_HOME={store.parent.parent} XDG_STATE_HOME={store.parent.parent}"
    tmux.start(f"{folders} XDG_CACHE_HOME={cache} {fake()}")
    tmux.until("[1 Live]", "ready", "mode tree")
    tmux.keys("s")
    tmux.until("Save a snapshot of what runs")
    tmux.keys("first", "Enter")
    tmux.until("saved ", "first")
    tmux.keys("m", "m")
    tmux.until("mode off")
    tmux.keys("5")
    tmux.until("[5 Snapshots]", "1 snapshot ", "first")
    tmux.keys("r")
    tmux.until("Roll back?", "mode: off -> tree", "Cancel")
    tmux.keys("y")
    tmux.until("cannot tell whether the figures are back", "mode tree", "rollback to first", "↩", limit_s=120)
    tmux.quit()


def entry(number: int, kind: str = "save", source: int | None = None) -> Entry:
    trailers = {} if source is None else {"restores": f"c{source}"}
    return Entry(f"c{number}", (), kind, f"id{number}", "", "", 0.0, "", trailers)  # type: ignore[arg-type]


def test_the_graph_joins_a_rollback_with_what_it_restored() -> None:
    history = [entry(5), entry(4, "rollback", 1), entry(3, "rollback", 2), entry(2), entry(1), entry(0)]
    assert graph(history) == ("●  ", "↩╮ ", "↩┼╮", "●┼╯", "●╯ ", "●  ")
    assert graph(history[:3]) == ("●  ", "↩╮ ", "↩┼╮")
    assert graph([]) == ()

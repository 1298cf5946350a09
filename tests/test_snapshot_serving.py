"""Snapshots beside a runtime: what ran before a rebuild is kept, whatever becomes of it; what a job may not set."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from console_driver import Driven
from fake_runtime import FakeRuntime
from http_serving import OPERATOR, served
from test_runtime_contract import ended, settle
from textual.widgets import Input
from tiny_models import tiny_config

import runtime.local
from console.app import ConsoleApp, Ending
from console.frame import Place
from console.snapshots_dialogs import RollbackDialog, SaveDialog
from runtime.config import RuntimeConfig
from runtime.http_client import HttpRuntime
from runtime.interface import ChangeReport, ConfigRejected
from runtime.local import LocalRuntime
from snapshots import environment, hashes, transfer
from snapshots.content import Snapshot
from snapshots.serving import StoreKeeper
from snapshots.store import Store


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The store of a test."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path / "ddtree" / "snapshots"


@pytest.fixture
async def local(tiny_folder: Path, home: Path) -> AsyncIterator[LocalRuntime]:
    config = tiny_config(tiny_folder / "target", tiny_folder / "drafter", mode="tree", max_tree_budget=16)
    made = LocalRuntime(config, keeper=StoreKeeper(home))
    await made.wait_ready()
    yield made
    await made.aclose()


@asynccontextmanager
async def attached_to(url: str) -> AsyncIterator[HttpRuntime]:
    """A client of the server at `url`, closed at the end of the block whatever happens in it."""
    client = HttpRuntime(url, OPERATOR)
    try:
        yield client
    finally:
        await client.aclose()


async def change(runtime: LocalRuntime, **settings: object) -> ChangeReport:
    return await runtime.apply(dict(settings), (await runtime.status()).revision, "ann")


async def test_what_runs_is_kept_before_a_rebuild_and_the_change_goes_on_whatever_becomes_of_it(
    local: LocalRuntime, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = await change(local, temperature=0.5)
    assert live.kept is None and not home.exists()
    report = await change(local, max_tree_budget=20)
    store = Store.at(home)
    (kept,) = store.list().entries
    assert kept.kind == "auto" and kept.label == "before max_tree_budget, changed by ann"
    assert report.kept == f"what ran before is kept as {kept.id}"
    assert store.load(kept.id)[1].config["max_tree_budget"] == 16 and not kept.foreign

    with (store.place.state / "lock").open("r+") as held:  # a store that others use delays nothing
        fcntl.flock(held, fcntl.LOCK_EX)
        monkeypatch.setattr(runtime.local, "KEEP_S", 0.05)
        report = await change(local, max_tree_budget=24)
        assert report.failure is None and "still being kept" in str(report.kept)
        assert (await local.describe()).max_tree_budget == 24
    await settle(lambda: len(store.list().entries) == 2, 60)

    monkeypatch.setattr(runtime.local, "KEEP_S", 60.0)
    local._keeper = StoreKeeper(home / "HEAD")  # a file
    report = await change(local, max_tree_budget=28)
    assert report.failure is None and (await local.describe()).max_tree_budget == 28
    assert "not kept as a snapshot" in str(report.kept) and "is a file" in str(report.kept)
    assert "\n" not in str(report.kept)

    local._keeper = StoreKeeper(home)
    await change(local, auto_snapshot=False)
    assert (await change(local, max_tree_budget=32)).kept is None
    assert len(store.list().entries) == 2


async def test_a_rollback_that_rebuilds_keeps_what_ran_before_once(local: LocalRuntime, home: Path) -> None:
    await ended(local, "snapshot", {"label": "good"})
    await change(local, max_tree_budget=20)
    job = await ended(local, "rollback", {"snapshot": "good", "measure": False})
    assert job.state == "done" and (await local.status()).config["max_tree_budget"] == 16, job.text
    kinds = [each.kind for each in Store.at(home).list().entries]
    assert kinds == ["rollback", "auto", "auto", "save"]


async def test_a_job_sets_no_path_that_another_host_wrote(home: Path, tmp_path: Path) -> None:
    elsewhere = Store.at(tmp_path / "elsewhere")
    config = RuntimeConfig(model="/mnt/models/big", tree_budget=8).model_dump()
    elsewhere.save(Snapshot(config=config, label="theirs"))
    transfer.export(elsewhere, "theirs", tmp_path / "theirs.tar")
    transfer.take_in(Store.at(home), tmp_path / "theirs.tar")
    fake = FakeRuntime()
    async with served(fake) as url, attached_to(url) as attached:
        assert (await attached.snapshots.page()).snapshots[0].foreign
        job = await ended(attached, "rollback", {"snapshot": "theirs"})
        assert job.state == "failed" and "model: /mnt/models/big is a path of a snapshot" in job.text
        assert fake.config.model != "/mnt/models/big" and len(Store.at(home).list().entries) == 1
        with pytest.raises(ConfigRejected, match="sglang_python: it is not set over HTTP"):
            await attached.preview({"sglang_python": "python3"})


async def test_an_attached_console_shows_saves_and_rolls_back_the_snapshots_of_its_server(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FakeRuntime(RuntimeConfig(mode="tree", tree_budget=11), round_s=0.001)
    server.keeper.snapshots._folder = server.keeper._folder = home
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "of the console"))
    async with served(server) as url, attached_to(url) as attached:
        app = ConsoleApp(attached, place=Place(attached_to=url))
        async with app.run_test(size=(110, 30)) as pilot:
            driven = Driven(app, server, pilot)
            await driven.until(lambda: app.view.description is not None, "attached")
            await driven.press("s")
            await driven.until(lambda: isinstance(app.screen, SaveDialog), "dialog")
            app.screen.query_one("#label", Input).value = "good"
            await driven.press("enter")
            await driven.until(lambda: "saved " in app.view.notice, "saved")
            await driven.until(lambda: not isinstance(app.screen, SaveDialog), "dialog gone")
            await driven.press("m")
            await driven.until(lambda: server.config.mode == "auto", "another setting")
            await driven.press("5")
            await driven.until(lambda: [each.label for each in app.snapshots._entries] == ["good"], "listed")
            await driven.until(lambda: "of the server" in driven.text("#store_line"), "whose they are")
            await driven.press("r")
            await driven.until(lambda: isinstance(app.screen, RollbackDialog), "preview")
            await driven.press("a")
            await driven.until(lambda: "rolled back to" in app.view.notice, "told")
            kinds = ["rollback", "auto", "save"]
            await driven.until(lambda: [each.kind for each in app.snapshots._entries] == kinds, "graph")
            assert "measured through the runtime" in driven.text("#verdict")
            app.exit(Ending.QUIT)
            await pilot.pause()
    assert server.config.mode == "tree" and len(Store.at(home).list().entries) == 3
    assert not (tmp_path / "of the console").exists()


async def test_model_files_too_large_to_be_read_while_saving_are_known_to_later_snapshots(
    local: LocalRuntime, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(hashes, "CHUNK_BYTES", 1024)
    monkeypatch.setitem(environment.capture.__kwdefaults__, "hash_seconds", 0.0)
    for label in ("first", "second"):
        assert (await ended(local, "snapshot", {"label": label})).state == "done"
        await settle(lambda: not any(each.name == "ddtree-hashes" for each in threading.enumerate()), 60)
    digests = {
        name: {file.path: file.sha256 for file in Store.at(home).load(name)[1].environment.files}
        for name in ("first", "second")
    }
    assert digests["first"]["model.safetensors"] is None
    assert all(digests["second"].values()), digests["second"]

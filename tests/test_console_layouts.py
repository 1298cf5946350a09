"""The Layouts screen by keys: ranking, memory, evidence, refusals, and a layout applied after its plan was seen."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from console_driver import Driven, console
from fake_runtime import FakeRuntime

from console.dialogs import ConfirmDialog
from console.layouts_screen import LayoutsScreen
from runtime.interface import ChangePlan, ChangeReport, FieldChange, GpuSample, HostSample, Status


class Flipping(FakeRuntime):
    """A runtime whose layout can be rebuilt."""

    layout = "single"
    notes = ""

    async def status(self) -> Status:
        status = await super().status()
        return status.model_copy(update={"config": {**status.config, "layout": self.layout}})

    async def preview(self, change: dict[str, Any]) -> ChangePlan:
        if set(change) != {"layout"}:
            return await super().preview(change)
        field = FieldChange(
            field="layout", old=self.layout, new=change["layout"], effect="rebuild", note=self.notes
        )
        return ChangePlan(
            revision=self._revision,
            changes=(field,),
            allowed=True,
            requests_running=0,
            unreached=0,
            outage_s=3.0,
            summary=f"layout {self.layout} -> {change['layout']}",
        )

    async def apply(self, change: dict[str, Any], revision: int, author: str = "local") -> ChangeReport:
        plan = await self.preview(change)
        self.layout = change["layout"]
        self._revision += 1
        return ChangeReport(revision=self._revision, applied=plan.changes, summary=plan.summary)


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path


def screen_of(driven: Driven) -> LayoutsScreen:
    screen = driven.app.screen_stack[0]
    assert isinstance(screen, LayoutsScreen)
    return screen


@asynccontextmanager
async def layouts(runtime: FakeRuntime | None = None, **options: Any) -> AsyncIterator[Driven]:
    async with console(runtime or Flipping(), **options) as driven:
        await driven.until(lambda: driven.app.view.host is not None, "a host sample")
        await driven.press("6")
        await driven.until(lambda: screen_of(driven).plan is not None, "a ranking")
        yield driven


def selected(driven: Driven) -> str:
    plan = screen_of(driven).plan
    assert plan is not None
    return plan.preset.name


async def go_to(driven: Driven, name: str) -> None:
    await driven.press("g")
    for _ in range(40):
        if selected(driven) == name:
            return
        await driven.press("j")
    raise AssertionError(f"{name} is not listed")


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_this_hosts_layouts_are_ranked_with_bars_and_reasons(size: tuple[int, int]) -> None:
    async with layouts(size=size) as driven:
        rows = driven.text("#ranking").splitlines()
        assert rows[0].startswith(">*single") and "measured 1" in rows[0] and "█" in rows[0]
        assert any("TP2 (MLP only)" in row for row in rows)
        assert any(row.split()[0] == "ep2" and "refused: ep = 2" in row for row in rows)
        assert "tok/s of all" in driven.text("#prediction")
        assert "calibrated by 1 record of 1 x " in driven.text("#prediction")
        assert "measured 40 tok/s, mode off, at 1; predicted" in driven.text("#evidence")
        memory = driven.text("#memory")
        assert all(word in memory for word in ("total", "KV cache", "drafter weights", "█"))
        shown = driven.shown().splitlines()
        assert len(shown) == size[1] and all(len(line) <= size[0] for line in shown)
        assert "a apply" in shown[-1]


async def test_keys_move_the_selection_and_its_details_follow() -> None:
    async with layouts() as driven:
        await go_to(driven, "tp2")
        assert "59 % of the weights are split over ranks" in driven.text("#prediction")
        await driven.press("G")
        assert "refused: " in driven.text("#prediction")
        assert "n/a" in driven.text("#memory")
        await driven.press("k", "k", "k", "k", "k")
        assert selected(driven) == "single"


async def test_the_load_of_the_ranking_is_chosen_by_keys() -> None:
    async with layouts() as driven:
        first = driven.text("#prediction")
        await driven.press("plus", "plus", "plus")
        await driven.until(lambda: "concurrency 8" in _title(driven), "ranked at 8")
        assert driven.text("#prediction") != first
        await driven.press("minus")
        await driven.until(lambda: "concurrency 4" in _title(driven), "ranked at 4")


def _title(driven: Driven) -> str:
    return str(driven.app.screen.query_one("#ranking").border_title)


async def test_layouts_for_other_hardware_are_shown_on_demand_with_their_evidence_and_scope() -> None:
    async with layouts(size=(120, 40)) as driven:
        await driven.press("o")
        await driven.until(lambda: "all layouts" in _title(driven), "all layouts")
        await go_to(driven, "kimi-rtx6000x8-tp8")
        evidence = driven.text("#evidence")
        assert "measured 97.9 tok/s, mode off, at 1; predicted" in evidence and "error -" in evidence
        assert "8 x RTX PRO 6000 Blackwell, PCIe, sglang, cuda 13.0" in evidence
        assert "CUDA_HOME=/usr/local/cuda-13.0: needs a new process" in evidence
        assert "calibrated by 5 records" in driven.text("#prediction")
        await driven.press("a")
        await driven.until(lambda: "not for this host and model" in driven.app.view.notice, "refused")
        await go_to(driven, "kimi-b300x8-tp8")
        assert "measured elsewhere, no advice here: 8 x RTX PRO" in driven.text("#evidence")


@pytest.mark.case("A28")
async def test_a_refused_layout_is_not_applied_and_the_reason_is_said() -> None:
    async with layouts() as driven:
        await go_to(driven, "ep2")
        await driven.press("a")
        await driven.until(lambda: "ep2 is refused: ep = 2" in driven.app.view.notice, "the reason")
        assert not isinstance(driven.app.screen, ConfirmDialog)
        await go_to(driven, "single")
        await driven.press("enter")
        await driven.until(lambda: "single is what runs" in driven.app.view.notice, "it runs")


async def test_a_layout_is_applied_only_after_its_plan_was_confirmed() -> None:
    runtime = Flipping()
    runtime.notes = "the engine's processes are started anew"
    async with layouts(runtime) as driven:
        await go_to(driven, "tp2")
        await driven.press("a")
        await driven.until(lambda: isinstance(driven.app.screen, ConfirmDialog), "asked")
        asked = driven.shown()
        assert "Change the layout to TP2 (MLP only)?" in asked
        assert "expected pause: about 3.0 s" in asked
        await driven.press("escape")
        assert runtime.layout == "single"
        await driven.press("a")
        await driven.until(lambda: isinstance(driven.app.screen, ConfirmDialog), "asked again")
        await driven.press("y")
        await driven.until(lambda: runtime.layout == "tp2", "applied")
        await driven.until(lambda: "layout single -> tp2" in driven.app.view.notice, "told")
        await driven.until(
            lambda: " *tp2" in driven.text("#ranking") or ">*tp2" in driven.text("#ranking"), "marked"
        )


async def test_undo_of_a_layout_shows_the_plan_of_the_way_back_and_asks() -> None:
    runtime = Flipping()
    async with layouts(runtime) as driven:
        await go_to(driven, "tp2")
        await driven.press("a")
        await driven.until(lambda: isinstance(driven.app.screen, ConfirmDialog), "asked")
        await driven.press("y")
        await driven.until(lambda: "layout single -> tp2" in driven.app.view.notice, "told")
        assert "u undoes" in driven.app.view.notice
        for answer in ("escape", "y"):
            assert runtime.layout == "tp2", "one key rebuilds nothing"
            await driven.press("u")
            await driven.until(lambda: isinstance(driven.app.screen, ConfirmDialog), "asked for the way back")
            asked = driven.shown()
            assert "Undo: layout back to single?" in asked and "expected pause: about 3.0 s" in asked
            await driven.press(answer)
        await driven.until(lambda: "undone: layout tp2 -> single" in driven.app.view.notice, "undone")
        assert runtime.layout == "single" and "u undoes" not in driven.app.view.notice
        await driven.press("u")
        await driven.until(lambda: "nothing to undo" in driven.app.view.notice, "nothing is left")


@pytest.mark.case("A27")
async def test_what_the_runtime_refuses_is_told_and_nothing_changes() -> None:
    runtime = FakeRuntime()
    runtime.refusals = {"layout": "pp2 needs 2 GPUs, torch sees 1"}
    async with layouts(runtime) as driven:
        await go_to(driven, "pp2")
        await driven.press("a")
        await driven.until(lambda: "pp2 needs 2 GPUs" in driven.app.view.notice, "refused")
        assert driven.app.view.notice_bad and runtime.config.layout == "single"


async def test_a_read_only_console_shows_and_does_not_apply() -> None:
    runtime = Flipping()
    async with layouts(runtime, read_only=True) as driven:
        await go_to(driven, "tp2")
        await driven.press("a")
        await driven.until(lambda: "read-only" in driven.app.view.notice, "refused")
        assert runtime.layout == "single"


async def test_gpus_of_the_runtimes_host_are_planned_for() -> None:
    runtime = Flipping()
    async with layouts(runtime, size=(120, 40)) as driven:
        cards = tuple(GpuSample(index=i, name="NVIDIA H200", memory_total=140 * 2**30) for i in range(2))
        runtime.emit(HostSample(host="box", time_s=0.0, gpus=cards))
        await driven.until(lambda: "2 x H200, NVLink" in _title(driven), "two GPUs")
        assert "of 140.0 GiB" in driven.text("#memory")


async def test_without_an_accept_length_plain_decoding_is_predicted_and_with_one_it_is_used() -> None:
    async with layouts(Flipping(answer="word " * 60)) as driven:
        assert "predicted for plain decoding" in driven.text("#prediction")
        await driven.ask("hello")
        await driven.answered()
        await driven.press("escape", "6")
        await driven.until(lambda: "as measured here" in driven.text("#prediction"), "the measured one")


async def test_text_from_a_file_cannot_style_the_screen(own_folders: Path) -> None:
    folder = own_folders / "config" / "ddtree" / "layouts"
    folder.mkdir(parents=True)
    (folder / "a.toml").write_text('name = "single"\ntitle = "[red]x[/red] [/"\nengine = "native"\n')
    async with layouts(size=(120, 40)) as driven:
        await driven.pilot.pause()
        assert "single: [red]x[/red] [/ (user file" in driven.shown()


async def test_a_wrong_file_of_the_user_is_named_on_the_screen(own_folders: Path) -> None:
    folder = own_folders / "config" / "ddtree" / "layouts"
    folder.mkdir(parents=True)
    (folder / "bad.toml").write_text('name = "\\u001b[31mred"\n')
    async with layouts(size=(120, 40)) as driven:
        assert "left out: " in driven.text("#ranking") and "bad.toml" in driven.text("#ranking")
        assert "\x1b" not in driven.text("#ranking")

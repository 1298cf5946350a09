"""Controls: fields with range and origin, edits collected into one planned change, undo, the last good one."""

from __future__ import annotations

import pytest
from console_driver import Driven, console
from fake_runtime import FakeRuntime
from rich.text import Text
from textual.app import App, ComposeResult
from textual.widgets import Button, Input, OptionList

from console.change_draft import Draft, about, plan_lines
from console.controls_screen import ControlsScreen
from console.dialogs import ConfirmDialog
from console.filtering import FilterLine
from console.lists import List
from runtime.config import EFFECTS, RuntimeConfig
from runtime.interface import ChangePlan, ConfigRejected, EngineState, FieldChange


async def edit(driven: Driven, field: str, value: str) -> None:
    """Edits one field by its dialog, found by the filter."""
    driven.app.screen.query_one(FilterLine).value = field
    await driven.until(lambda: list(fields(driven)) == [field], "filtered")
    await driven.press("e")
    await driven.until(lambda: bool(driven.app.screen.query("FieldDialog Input")), "the dialog")
    driven.app.screen.query_one(Input).value = value
    await driven.press("enter")


def fields(driven: Driven) -> dict[str, list[str]]:
    table = driven.app.controls.query_one(List)
    rows = [[str(cell) for cell in table.get_row(key)] for key in table.rows]
    return {row[1]: row for row in rows}


# The draft


def test_a_draft_collects_edits_as_typed_values_and_forgets_what_is_in_force():
    config = RuntimeConfig(tree_budget=11).model_dump()
    draft = Draft().with_edit(config, "temperature", "0.7").with_edit(config, "threads", "auto")
    assert draft.edits == {"temperature": 0.7}
    draft = draft.with_edit(config, "prefix_reuse", "false").with_edit(config, "temperature", "0")
    assert draft.edits == {"prefix_reuse": False}
    assert draft.on({**config, "prefix_reuse": False}).edits == {}


def test_a_wrong_value_is_refused_naming_field_and_range_and_so_is_one_that_does_not_fit_the_others():
    config = RuntimeConfig(tree_budget=11).model_dump()
    with pytest.raises(ConfigRejected, match="temperature = 9: must be a number from 0 to 2"):
        Draft().with_edit(config, "temperature", "9")
    with pytest.raises(ConfigRejected, match="must not exceed max_tree_budget"):
        Draft().with_edit(config, "max_tree_budget", "8")
    both = Draft().with_edit(config, "tree_budget", "4").with_edit(config, "max_tree_budget", "8")
    assert both.edits == {"tree_budget": 4, "max_tree_budget": 8}


def test_a_plan_says_what_is_live_rebuilt_or_refused_the_outage_and_what_is_not_reached():
    changes = (
        FieldChange(field="temperature", old=0.0, new=0.5, effect="live"),
        FieldChange(field="dtype", old="auto", new="bfloat16", effect="rebuild"),
    )
    plan = ChangePlan(
        revision=1,
        changes=changes,
        allowed=True,
        requests_running=2,
        unreached=2,
        outage_s=4.25,
        summary="",
    )
    text = "\n".join(line for line, _ in plan_lines(plan))
    assert "live     temperature 0 -> 0.5" in text and "rebuild  dtype auto -> bfloat16" in text
    assert "expected outage 4.2 s; 2 requests in flight" in text and "then 503" in text
    assert "not reached: 2 requests" in text
    text = "\n".join(line for line, _ in plan_lines(plan.model_copy(update={"outage_s": None})))
    assert "expected outage unknown" in text


# The screen


async def test_every_field_has_its_value_range_origin_and_how_it_acts():
    async with console(FakeRuntime(RuntimeConfig(tree_budget=11)), size=(160, 50)) as driven:
        await driven.press("4")
        await driven.until(lambda: len(fields(driven)) == len(EFFECTS), "all fields")
        rows = fields(driven)
        assert {name: row[3] for name, row in rows.items()} == EFFECTS
        assert rows["tree_budget"][2:] == [
            "11",
            "live",
            "command line",
            "a whole number from 0 to 1024, or auto",
        ]
        assert rows["model"][4] == "default" and rows["threads"][4] == "n/a"


async def test_edits_collect_and_are_applied_as_one_change_after_the_plan_is_shown_and_undone_as_one():
    async with console(size=(100, 30)) as driven:
        await driven.press("4")
        await edit(driven, "temperature", "0.7")
        await edit(driven, "max_queue", "9")
        await driven.until(lambda: "live     max_queue 256 -> 9" in driven.text("#plan"), "the plan")
        assert "live     temperature 0 -> 0.7" in driven.text("#plan") and "no outage" in driven.text("#plan")
        assert driven.runtime.config == FakeRuntime().config, "nothing is applied yet"
        await driven.press("a")
        assert isinstance(driven.app.screen, ConfirmDialog)
        await driven.press("escape")
        assert driven.runtime.config == FakeRuntime().config
        await driven.press("a", "y")
        await driven.until(lambda: driven.runtime.config.max_queue == 9, "applied")
        assert driven.runtime.config.temperature == 0.7
        await driven.until(lambda: not driven.app.controls.draft.edits, "no edits are left")
        await driven.press("u")
        await driven.until(lambda: driven.runtime.config == FakeRuntime().config, "both undone")
        await driven.until(lambda: "undone: " in driven.app.view.notice, "told")


async def test_a_choice_is_chosen_from_a_list_and_a_wrong_number_is_refused_in_the_dialog():
    async with console(size=(100, 30)) as driven:
        await driven.press("4", "slash", *"mode", "enter", "e")
        await driven.until(lambda: bool(driven.app.screen.query("FieldDialog OptionList")), "the dialog")
        options = driven.app.screen.query_one(OptionList)
        assert options.highlighted == 2
        await driven.press("k", "enter")
        await driven.until(lambda: driven.app.controls.draft.edits == {"mode": "chain"}, "chosen")
        await driven.press("backspace")
        assert not driven.app.controls.draft.edits
        await edit(driven, "top_p", "7")
        assert "top_p = 7: must be a number above 0 and of at most 1" in driven.text("#wrong")
        await driven.press("escape")
        assert isinstance(driven.app.screen, ControlsScreen)


async def test_a_refused_plan_says_why_and_is_not_applied():
    runtime = FakeRuntime()
    runtime.refusals["max_queue"] = "no room for a queue"
    async with console(runtime, size=(100, 30)) as driven:
        await driven.press("4")
        await edit(driven, "max_queue", "9")
        await driven.until(lambda: "refused: no room for a queue" in driven.text("#plan"), "the reason")
        await driven.press("a")
        assert isinstance(driven.app.screen, ControlsScreen)
        await driven.until(lambda: "no room for a queue" in driven.app.view.notice, "told")
        assert runtime.config.max_queue == 256


async def test_a_rebuild_asks_with_cancel_as_the_default():
    async with console(size=(100, 30)) as driven:
        await driven.press("4")
        plan = ChangePlan(
            revision=1,
            changes=(FieldChange(field="dtype", old="auto", new="bfloat16", effect="rebuild"),),
            allowed=True,
            requests_running=1,
            unreached=0,
            outage_s=3.0,
            summary="",
        )
        driven.app.post_message(ControlsScreen.ApplyAsked({"dtype": "bfloat16"}, plan))
        await driven.until(lambda: isinstance(driven.app.screen, ConfirmDialog), "asked")
        assert "expected outage 3.0 s; 1 request in flight" in driven.shown()
        assert isinstance(driven.app.focused, Button) and driven.app.focused.id == "no"
        await driven.press("enter")
        assert isinstance(driven.app.screen, ControlsScreen)


async def test_while_the_engine_is_rebuilt_the_screen_says_how_far_it_is_and_what_clients_see():
    async with console(size=(100, 30)) as driven:
        await driven.press("4")
        driven.runtime.become(EngineState.REBUILDING, "loading the target")
        await driven.until(lambda: "rebuilding: loading the target" in driven.text("#plan"), "progress")
        assert "open streams pause" in driven.text("#plan") and "queue_timeout 30 s" in driven.text("#plan")
        driven.runtime.become(EngineState.READY)
        await driven.until(lambda: "rebuilding" not in driven.text("#plan"), "over")


async def test_the_last_good_configuration_is_one_key_away():
    runtime = FakeRuntime()
    async with console(runtime, size=(100, 30)) as driven:
        await driven.press("4", "L")
        await driven.until(lambda: "no last good configuration is kept" in driven.app.view.notice, "none")
        runtime.last_good = RuntimeConfig(mode="chain", temperature=0.5).model_dump()
        await driven.until(lambda: bool(driven.app.view.status and driven.app.view.status.last_good), "known")
        await driven.press("L")
        await driven.until(lambda: "live     mode tree -> chain" in driven.text("#plan"), "planned")
        assert driven.app.controls.draft.edits == {"mode": "chain", "temperature": 0.5}
        await driven.press("a", "y")
        await driven.until(lambda: runtime.config.mode == "chain", "applied")
        await driven.press("L")
        await driven.until(lambda: "is the last good one" in driven.app.view.notice, "in force")
        await edit(driven, "max_queue", "9")
        await driven.press("L")
        assert driven.app.controls.draft.edits == {"max_queue": 9}, (
            "edits stay where there is nothing to collect"
        )


async def test_a_change_by_somebody_else_makes_a_new_plan_and_drops_edits_that_are_in_force():
    async with console(size=(100, 30)) as driven:
        await driven.press("4")
        await edit(driven, "max_queue", "9")
        await edit(driven, "temperature", "0.5")
        await driven.until(lambda: driven.app.controls.plan is not None, "planned")
        status = await driven.runtime.status()
        await driven.runtime.apply({"max_queue": 9, "top_k": 5}, status.revision, "somebody else")
        await driven.until(lambda: driven.app.controls.draft.edits == {"temperature": 0.5}, "dropped")
        await driven.until(
            lambda: driven.app.controls.plan is not None and driven.app.controls.plan.revision == 2, "anew"
        )


async def test_a_read_only_console_shows_the_fields_and_edits_none():
    async with console(read_only=True, size=(100, 30)) as driven:
        await driven.press("4")
        for key in ("enter", "e", "a", "L", "D", "backspace"):
            await driven.press(key)
            assert isinstance(driven.app.screen, ControlsScreen), key
        assert "read-only" in driven.app.view.notice
        await driven.press("slash", *"top_k", "enter")
        assert list(fields(driven)) == ["top_k"]


async def test_the_filter_takes_words_and_leaves_out_others_and_escape_shows_all_again():
    async with console(size=(100, 30)) as driven:
        await driven.press("4", "slash", *"live !max")
        await driven.until(lambda: "temperature" in fields(driven), "filtered")
        shown = fields(driven)
        assert all("max" not in name and row[3] == "live" for name, row in shown.items())
        await driven.press("escape")
        await driven.until(lambda: len(fields(driven)) == len(EFFECTS), "all")
        assert isinstance(driven.app.focused, List)


async def test_a_list_that_is_shown_before_it_is_mounted_has_its_cells():
    class Early(App[None]):
        def compose(self) -> ComposeResult:
            self.early = List(id="early", columns=("name",))
            self.early.show([("a", (Text("first"),))])
            yield self.early

    async with Early().run_test() as pilot:
        await pilot.pause()
        assert [str(cell) for cell in pilot.app.early.get_row("a")] == ["first"]  # type: ignore[attr-defined]
        assert len(pilot.app.early.columns) == 1  # type: ignore[attr-defined]


async def test_a_screen_put_together_out_of_sight_is_whole_at_first_sight():
    async with console(size=(80, 24)) as driven:
        await driven.app._init_mode("Controls")
        await driven.press("4")
        await driven.until(lambda: "tree_budget" in driven.shown(), "a column as wide as its names")
        words = " ".join(driven.shown().split())
        assert " ".join(about("mode").split()) in words, "a line that is wrapped is told to its end"
        assert words.count("origin:") == 1

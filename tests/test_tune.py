"""Tune on runtimes whose speeds are known: it finds, resumes, refuses, applies and takes back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fake_runtime import FakeRuntime
from tiny_models import tiny_config
from virtual_time import run_virtual

from console.cli import main
from runtime.config import RuntimeConfig, to_toml
from runtime.interface import (
    ChangeReport,
    ConfigRejected,
    GenerateEvent,
    GenerateRequest,
    RequestFinished,
    RequestStats,
    RuntimeFault,
    TokenPiece,
    TokensEmitted,
)
from runtime.load_report import Slo
from runtime.tune import Ledger, TunePlan, TuneRefused, TuneReport, tune
from runtime.tune_commands import apply_to_file, apply_to_runtime
from runtime.tune_layouts import REPEATS, LayoutsReport, compared, tune_layouts
from snapshots.store import Store

PROMPTS = tuple({"prompt": f"prompt {number}"} for number in range(12))
SPEEDS = {0: 20.0, 4: 30.0, 7: 40.0, 11: 42.0, 15: 41.0, 23: 30.0, 31: 20.0, 63: 10.0}
"""tok/s by tree budget; 0 is plain decoding."""
CHAIN = 25.0


class Paced(FakeRuntime):
    """Decodes as fast as `SPEEDS` says, in the loop's time; a tree in force may be slower than one asked for."""

    def __init__(self, config: RuntimeConfig | None = None, in_force: float = 1.0) -> None:
        super().__init__(config or RuntimeConfig(mode="off"))
        self.in_force = in_force
        self.asked: list[tuple[str | None, int | None]] = []
        self.breaks_at: int | None = None
        self.stalled: tuple[int, ...] = ()
        """Tree budgets whose answers the host holds up for a moment."""
        self.by_layout = {"single": 1.0}
        """Speed of each layout; a rebuild to another one fails."""

    async def apply(self, change: dict[str, Any], revision: int, author: str = "local") -> ChangeReport:
        if change.get("layout", "single") in self.by_layout:
            return await super().apply(change, revision, author)
        return ChangeReport(revision=revision, applied=(), summary="", failure="a rank did not start")

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        self.asked.append((request.mode, request.tree_budget))
        if len(self.asked) == self.breaks_at:
            raise RuntimeFault("the engine fell over")
        mode, budget = request.mode or self.config.mode, request.tree_budget
        speed = (
            CHAIN
            if mode == "chain"
            else SPEEDS[0 if mode == "off" else budget or self.config.tree_budget or 0]
        )
        slow = request.mode is None and mode == "tree"
        pause = 1 / (speed * (self.in_force if slow else 1.0) * self.by_layout[self.config.layout])
        tokens = request.sampling.max_tokens or 8
        for number in range(tokens):
            stall = 0.5 if number == 3 and budget in self.stalled else 0.0
            await asyncio.sleep((pause if number else 0.1) + stall)
            piece = TokenPiece(token_id=1, text="x", drafted=False)
            yield TokensEmitted(request_id="r", pieces=(piece,))
        stats = RequestStats(
            request_id="r",
            mode=mode,
            tree_budget=budget or 0,
            temperature=0.0,
            prompt_tokens=3,
            cached_tokens=0,
            output_tokens=tokens,
            rounds=tokens - 1,
            num_correct_drafts=0,
            accept_length=1.0,
        )
        yield RequestFinished(request_id="r", reason="length", text="", token_ids=(), stats=stats)


def tuned(runtime: Paced, folder: Path | None = None, **changes: Any) -> TuneReport:
    plan = TunePlan(**{"prompts": PROMPTS, "max_tokens": 8} | changes)
    return run_virtual(tune(runtime, plan, Ledger(folder)))


@pytest.mark.parametrize(("objective", "users"), [("latency", 1), ("throughput", 3)])
def test_the_fastest_setting_is_found_with_its_gain(objective: str, users: int) -> None:
    runtime = Paced()
    report = tuned(runtime, objective=objective, concurrency=users)
    assert report.mode == "tree" and SPEEDS[report.tree_budget] >= 0.97 * 42.0
    assert report.measurements < report.exhaustive / 3 and report.worth_it
    assert report.results[0].tree_budget == report.tree_budget
    assert report.over_plain is not None and report.over_plain[1] > 1.0
    if objective == "latency":
        assert report.over_plain[0] == pytest.approx(SPEEDS[report.tree_budget] / 20.0, rel=0.05)
        assert report.results[0].value == pytest.approx(SPEEDS[report.tree_budget], rel=0.05)
    assert runtime.config == RuntimeConfig(mode="off"), "the runtime's own configuration is not touched"
    assert "fastest for" in report.table()


def test_moments_that_another_process_takes_do_not_decide() -> None:
    runtime = Paced()
    runtime.stalled = (7, 11, 15)
    report = tuned(runtime)
    assert report.mode == "tree" and SPEEDS[report.tree_budget] >= 0.97 * 42.0
    assert report.results[0].value == pytest.approx(SPEEDS[report.tree_budget], rel=0.05)


def test_goodput_is_sought_under_a_rate() -> None:
    report = tuned(Paced(), objective="goodput", rate=2.0, slo=Slo(tpot_s=1 / 41.5))
    assert (report.mode, report.tree_budget) == ("tree", 11), "the only one that keeps to the SLO"


def test_budgets_beyond_the_reserve_and_speculation_without_a_drafter_are_not_tried() -> None:
    runtime = Paced(RuntimeConfig(mode="off", max_tree_budget=12))
    report = tuned(runtime)
    assert max(each.tree_budget for each in report.results) <= 12


def test_a_tune_that_was_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = Paced()
    expected = tuned(whole)
    broken = Paced()
    broken.breaks_at = len(whole.asked) // 2
    with pytest.raises(RuntimeFault, match="fell over"):
        tuned(broken, tmp_path)
    (kept,) = tmp_path.iterdir()
    kept.write_text(kept.read_text() + '{"mode": "tr')
    again = Paced()
    report = tuned(again, tmp_path)
    assert (report.tree_budget, report.measurements) == (expected.tree_budget, expected.measurements)
    assert 0 < len(again.asked) < len(whole.asked)
    assert "gone on with" in report.notes[0]
    assert not list(tmp_path.iterdir()), "nothing is left of a tune that has ended"


def test_another_load_does_not_go_on_with_it(tmp_path: Path) -> None:
    broken = Paced()
    broken.breaks_at = 10
    with pytest.raises(RuntimeFault):
        tuned(broken, tmp_path)
    assert not tuned(Paced(), tmp_path, temperature=1.0).notes


def test_while_others_are_served_it_refuses() -> None:
    runtime = Paced()
    status = run_virtual(runtime.status()).model_copy(update={"running": 2})

    async def busy() -> Any:
        return status

    runtime.status = busy  # type: ignore[method-assign]
    with pytest.raises(TuneRefused, match="2 requests of others") as refused:
        tuned(runtime)
    assert refused.value.exit_code == 3 and not runtime.asked
    assert tuned(runtime, under_load=True).mode == "tree"


@pytest.mark.parametrize(("in_force", "kept"), [(1.0, True), (0.4, False)])
def test_what_is_applied_is_measured_and_taken_back_if_it_is_slower(in_force: float, kept: bool) -> None:
    runtime = Paced(in_force=in_force)
    plan = TunePlan(prompts=PROMPTS, max_tokens=8)

    async def act() -> str:
        return await apply_to_runtime(runtime, plan, await tune(runtime, plan), "test")

    said = run_virtual(act())
    assert runtime.config.mode == ("tree" if kept else "off")
    assert ("taken back" in said) is not kept


def test_a_change_that_the_runtime_refuses_is_an_error() -> None:
    runtime = Paced()
    plan = TunePlan(prompts=PROMPTS, max_tokens=8)
    report = run_virtual(tune(runtime, plan)).model_copy(update={"tree_budget": 999})
    with pytest.raises(ConfigRejected):
        run_virtual(apply_to_runtime(runtime, plan, report, "test"))


def test_applied_to_a_file_the_rest_of_it_stays(tmp_path: Path) -> None:
    report = tuned(Paced())
    file = tmp_path / "ddtree" / "config.toml"
    assert str(file) in apply_to_file(file, RuntimeConfig(), report)
    assert f"tree_budget = {report.tree_budget}" in file.read_text()
    file.write_text('# my host\nthreads = 2  # measured\nmode = "off"\n')
    apply_to_file(file, RuntimeConfig(), report)
    assert file.read_text() == (
        f'# my host\nthreads = 2  # measured\nmode = "tree"\ntree_budget = {report.tree_budget}\n'
    )


def layouts_tuned(runtime: Paced, folder: Path | None = None) -> LayoutsReport:
    plan = TunePlan(prompts=PROMPTS, max_tokens=8)
    return run_virtual(tune_layouts(runtime, plan, ("pp2", "tp2"), "test", folder))


@pytest.mark.parametrize(("pp2", "found"), [(1.5, "pp2"), (1.0, "single"), (0.7, "single")])
def test_a_faster_layout_is_found_and_what_was_in_force_is_put_back(pp2: float, found: str) -> None:
    runtime = Paced()
    runtime.by_layout["pp2"] = pp2
    report = layouts_tuned(runtime)
    assert report.layout == found and report.over_layout is not None
    assert report.over_layout[0] == pytest.approx(pp2, rel=0.05)
    assert runtime.config == RuntimeConfig(mode="off")
    home, other, broken = report.layouts
    assert (home.layout, other.layout) == ("single", "pp2") and len(home.values) == len(other.values)
    assert broken.refused == "a rank did not start" and "not measured: a rank" in report.table()
    assert report.results[0].value == pytest.approx(42.0 * (pp2 if found == "pp2" else 1.0), rel=0.05)


def test_a_layout_that_was_found_is_applied_with_its_setting() -> None:
    runtime = Paced()
    runtime.by_layout["pp2"] = 1.5

    async def act() -> str:
        plan = TunePlan(prompts=PROMPTS, max_tokens=8)
        return await apply_to_runtime(
            runtime, plan, await tune_layouts(runtime, plan, ("pp2",), "test"), "test"
        )

    run_virtual(act())
    assert (runtime.config.layout, runtime.config.mode) == ("pp2", "tree")


def test_stopped_in_another_layout_it_puts_the_first_back_and_goes_on_there(tmp_path: Path) -> None:
    whole = Paced()
    whole.by_layout["pp2"] = 1.5
    layouts_tuned(whole)
    broken = Paced()
    broken.by_layout["pp2"] = 1.5
    broken.breaks_at = int(0.9 * len(whole.asked))
    with pytest.raises(RuntimeFault, match="fell over"):
        layouts_tuned(broken, tmp_path)
    assert broken.config.layout == "single"
    again = Paced()
    again.by_layout["pp2"] = 1.5
    assert layouts_tuned(again, tmp_path).layout == "pp2"
    assert len(again.asked) < len(whole.asked) / 2
    assert not list(tmp_path.iterdir())


def test_no_layout_is_built_under_requests_of_others() -> None:
    alone = Paced()
    tuned(alone)
    runtime = Paced()
    runtime.by_layout["pp2"] = 1.5
    quiet = runtime.status

    async def status() -> Any:
        others = 2 * (len(runtime.asked) >= len(alone.asked) + REPEATS * len(PROMPTS))
        return (await quiet()).model_copy(update={"running": others})

    runtime.status = status  # type: ignore[method-assign]
    with pytest.raises(TuneRefused, match="2 requests of others"):
        layouts_tuned(runtime)
    assert not run_virtual(quiet()).history, "nothing was applied"


def test_a_layout_that_somebody_else_puts_in_force_meanwhile_is_left() -> None:
    runtime = Paced()
    runtime.by_layout |= {"pp2": 0.7, "ep2": 1.0}
    plain = runtime.apply

    async def apply(change: dict[str, Any], revision: int, author: str = "local") -> ChangeReport:
        report = await plain(change, revision, author)
        if change == {"layout": "tp2"}:
            await plain({"layout": "ep2"}, (await runtime.status()).revision, "a colleague")
        return report

    runtime.apply = apply  # type: ignore[method-assign]
    report = layouts_tuned(runtime)
    assert runtime.config.layout == "ep2" and "layout ep2 was put in force by somebody else" in report.table()


def test_layouts_that_chance_may_order_are_not_told_apart() -> None:
    gain = compared((10.0, 12.0, 11.0, 9.0, 13.0), (10.0, 11.0, 10.5, 9.5, 11.0))
    assert gain.low < 1 < gain.ratio < gain.high
    assert compared((11.0, 11.1, 10.9, 11.0, 11.0), (10.0, 10.1, 9.9, 10.0, 10.0)).low > 1.05


def test_the_command_tunes_an_engine_and_writes_what_it_found(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_STATE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc"}\n{"prompt": "the cat"}\n')
    file = tmp_path / "config.toml"
    file.write_text(to_toml(tiny_config(tiny_folder / "target", tiny_folder / "drafter", mode="chain")))
    options = (
        "--budgets",
        "4",
        "--max-tokens",
        "4",
        "--prompts",
        str(prompts),
        "--config",
        str(file),
    )
    code = main(["tune", "--json", "--apply", "--layouts", "pp2", *options])
    told = capsys.readouterr()
    assert code == 0, told.err
    answer = json.loads(told.out)
    assert [each["layout"] for each in answer["layouts"]] == ["single", "pp2"]
    assert all(len(each["values"]) > 1 for each in answer["layouts"]), told.out
    assert answer["schema"] == 1 and answer["kind"] == "tune"
    assert {(each["mode"], each["tree_budget"]) for each in answer["results"]} == {
        ("off", 0),
        ("chain", 0),
        ("tree", 4),
    }
    assert answer["applied"] and "applied:" in told.err
    if answer["worth_it"]:
        assert f'mode = "{answer["mode"]}"' in file.read_text()
    (kept,) = Store.at(None).list().entries
    assert (
        kept.label.startswith(f"tune for latency: {answer['layout']}, ")
        and "fastest for latency" in kept.note
    )
    figures = Store.at(None).load(kept.commit)[1].measurements.results
    assert {(each.mode, each.tree_budget) for each in figures} == {("off", 0), ("chain", 0), ("tree", 4)}
    assert all(each.tok_s and "ddtree tune" in each.conditions for each in figures)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--objective", "goodput"], "need each other"),
        (["--slo", "ttft=1s"], "need each other"),
        (["--rate", "3"], "--objective goodput only"),
        (["--modes", "tree,forest"], "'forest'"),
        (["--budgets", "4,x"], "'4,x'"),
        (["--layouts", "pp2,nowhere"], "'nowhere' is not one of"),
        (["--url", "http://127.0.0.1:9", "--threads", "2"], "server's own setting"),
    ],
)
def test_wrong_usage(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["tune", *options])
    assert code == 2 and words in capsys.readouterr().err


def test_apply_is_refused_where_only_reading_is_allowed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DDTREE_READ_ONLY", "1")
    assert main(["tune", "--apply"]) == 3
    assert "DDTREE_READ_ONLY" in capsys.readouterr().err

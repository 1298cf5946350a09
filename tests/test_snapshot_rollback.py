"""Saving what runs, going back, measuring again, finding where a figure fell; on a runtime that answers by script."""

from __future__ import annotations

import asyncio
import zipfile
from pathlib import Path
from typing import Any

import pytest
from fake_runtime import FakeRuntime
from git_stores import snapshot
from installed_package import NAME, build_wheel, contents, patch
from tiny_models import tiny_config

from runtime.config import DEFAULT_MODEL, RuntimeConfig
from runtime.interface import ChangeReport, GenerateRequest, RequestFinished, RuntimeUnavailable
from snapshots import checks, installed, live, rollback, saving, transfer
from snapshots.content import Figure, digest
from snapshots.diff import compare, verdict
from snapshots.git import StoreRefused, UnknownSnapshot
from snapshots.live import TrafficArrived
from snapshots.rollback import RollbackFailed, RollbackOptions
from snapshots.saving import SaveRequest, SecretFound
from snapshots.store import Store


@pytest.fixture(autouse=True)
def folders_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.at(tmp_path / "store")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Site-packages with one small package."""
    folder = tmp_path / "environment" / "lib" / "python3" / "site-packages"
    folder.mkdir(parents=True)
    _install(folder, tmp_path, "1.2.0")
    monkeypatch.setattr(installed, "default_site_packages", lambda: folder)
    return folder


def _install(site: Path, scratch: Path, version: str) -> None:
    for old in site.glob("*.dist-info"):
        old.rename(scratch / f"gone-{version}-{old.name}")
    with zipfile.ZipFile(build_wheel(scratch, version)) as wheel:
        wheel.extractall(site)


def fake(**options: Any) -> FakeRuntime:
    return FakeRuntime(RuntimeConfig(tree_budget=8), **{"round_s": 0.001, **options})


def request(**given: Any) -> SaveRequest:
    return SaveRequest(**{"packages": (), "running_units": False, **given})


async def text_of(runtime: FakeRuntime, prompt: str = "a fixed prompt") -> str:
    async for event in runtime.generate(GenerateRequest(prompt=prompt, client="someone")):
        if isinstance(event, RequestFinished):
            return event.text
    raise AssertionError


async def change(runtime: FakeRuntime, **settings: Any) -> None:
    await runtime.apply(settings, (await runtime.status()).revision, "a colleague")


async def test_save_flip_save_diff_and_back(store: Store) -> None:
    runtime = fake()
    told = await text_of(runtime)
    good = await saving.save_running(store, runtime, request(label="good", note="#1 best"))
    await saving.measure(store, good, runtime)
    before = (await runtime.status()).config
    await change(runtime, mode="off", temperature=0.5)
    await saving.save_running(store, runtime, request(label="worse"))
    found = compare(store.load("good")[1], store.load("worse")[1])
    assert {each.name: (each.before, each.after) for each in found.settings} == {
        "mode": ("tree", "off"),
        "temperature": ("0.0", "0.5"),
    }
    plan = await rollback.preview(store, "good", runtime, RollbackOptions(author="test"))
    assert plan.change == {"mode": "tree", "temperature": 0.0} and not plan.refusals
    assert any("mode: off -> tree" in line for line in plan.text())
    assert (await runtime.status()).config["mode"] == "off"  # looking changes nothing
    outcome = await rollback.perform(store, plan, runtime)
    assert (await runtime.status()).config == before
    assert await text_of(runtime) == told
    assert outcome.back is True and outcome.verdict.startswith("figures are back: now")
    assert (await runtime.status()).history[-1].author == "test"
    entry, restored = store.load(outcome.entry.id)
    assert entry.kind == "rollback" and entry.source == good.commit
    assert restored.config == store.load("good")[1].config
    assert [each.label for each in store.list().entries] == [
        "rollback to good",
        "before rollback to good",
        "worse",
        "good",
    ]
    kept, before_it = store.load("latest~1")
    assert kept.kind == "auto" and before_it.config["mode"] == "off" and kept.id in str(outcome.kept)
    assert outcome.verdict.endswith("(measured through the runtime)")
    assert store.list().entries[0].tok_s == pytest.approx(outcome.figure.tok_s, rel=1e-4)
    assert entry.note == "#1 best"


async def test_slower_is_called_not_back(store: Store) -> None:
    runtime = fake()
    good = await saving.save_running(store, runtime, request(label="good"))
    figure = await saving.measure(store, good, runtime)
    runtime.round_s *= 3
    outcome = await rollback.perform(store, await rollback.preview(store, "good", runtime), runtime)
    assert outcome.back is False
    assert (
        outcome.verdict.startswith("figures are not back: now")
        and f"then {figure.tok_s:.1f} tok/s" in outcome.verdict
    )
    assert outcome.applied == "the runtime runs these settings already"


def test_what_was_not_measured_alike_is_not_compared() -> None:
    bench = Figure(source="bench", mode="tree", tree_budget=8, tok_s=40.0, conditions="a")
    for then in (
        None,
        bench.model_copy(update={"source": "live"}),
        bench.model_copy(update={"conditions": "b"}),
    ):
        back, line = verdict(then, bench)
        assert back is None and line.startswith("cannot tell whether the figures are back")
    assert verdict(bench, bench, ("A", "B"))[1].endswith("on other hardware (A then, B now)")


async def test_live_figures_have_their_conditions(store: Store) -> None:
    runtime = fake()
    for _ in range(3):
        await text_of(runtime)
    await live.ask(runtime, "not traffic", 8)
    await saving.save_running(store, runtime, request(label="live"))
    _, loaded = store.load("live")
    (row,) = [each for each in loaded.measurements.results if each.source == "live"]
    assert (row.requests, row.mode, row.tree_budget) == (3, "tree", 8)
    assert row.window_s is not None and 0 < row.window_s < live.WINDOW_S
    assert row.accept_length is not None and row.conditions.startswith("live traffic")
    assert loaded.host.name == "fake" and loaded.environment.hardware.cpu is None  # it runs elsewhere
    assert loaded.measurements.state.startswith("ready, 3 requests in the last 300 s")


async def test_saving_disturbs_no_request_and_measuring_waits(store: Store) -> None:
    runtime = fake(round_s=0.05)
    alone = await text_of(runtime)
    running = asyncio.create_task(text_of(runtime))
    while not (await runtime.status()).running:
        await asyncio.sleep(0.01)
    good = await saving.save_running(store, runtime, request(label="good"))
    assert not running.done()
    with pytest.raises(TrafficArrived, match="1 other request in flight.*--under-load"):
        await saving.measure(store, good, runtime)
    outcome = await rollback.perform(store, await rollback.preview(store, "good", runtime), runtime)
    assert "other request in flight" in outcome.notes[0] and outcome.back is None
    assert await running == alone
    assert [each.client for each in runtime.seen if each.client == live.CLIENT] == [live.CLIENT]  # the probe


async def test_not_running_is_said(store: Store) -> None:
    entry = await saving.save_resolved(store, RuntimeConfig().model_dump(), request(note="to try"))
    assert entry.trailers["measured"] == "not running, not measured"
    plan = await rollback.preview(store, "latest", None, config=RuntimeConfig(mode="off").model_dump())
    assert plan.change["mode"] == "tree"
    outcome = await rollback.perform(store, plan)
    assert outcome.applied == "no runtime is running: nothing was applied" and outcome.back is None


async def test_a_refused_change_is_refused_before_anything(store: Store) -> None:
    runtime = fake()
    store.save(snapshot("other", mode="off"))
    runtime.refusals["mode"] = "mode: not now"
    plan = await rollback.preview(store, "other", runtime)
    with pytest.raises(StoreRefused, match="mode: not now"):
        await rollback.perform(store, plan, runtime)
    assert len(store.list().entries) == 1


class Breaking(FakeRuntime):
    """A runtime that takes a change and then cannot serve with it."""

    async def apply(self, change: dict[str, Any], revision: int, author: str = "local") -> ChangeReport:
        report = await super().apply(change, revision, author)
        self.rejection = "the engine fell over" if self.config.mode == "off" else None
        if self.config.mode == "chain":
            raise RuntimeUnavailable("the engine fell over")
        return report


async def test_a_change_that_the_runtime_took_back_itself_is_a_failed_rollback(store: Store) -> None:
    class Refusing(FakeRuntime):
        async def apply(self, change: dict[str, Any], revision: int, author: str = "local") -> ChangeReport:
            if change.get("mode") != "off":
                return await super().apply(change, revision, author)
            line = "it failed: no memory; the configuration before it serves again"
            return ChangeReport(revision=revision, applied=(), summary=line, failure="no memory")

    runtime = Refusing(RuntimeConfig(tree_budget=8), round_s=0.001)
    store.save(snapshot("bad", mode="off", model=DEFAULT_MODEL))
    plan = await rollback.preview(store, "bad", runtime)
    with pytest.raises(RollbackFailed, match="failed: no memory; what ran before"):
        await rollback.perform(store, plan, runtime)
    assert store.load("latest")[1].config["mode"] == "tree"


@pytest.mark.parametrize("mode", ["off", "chain"])
async def test_a_failed_change_is_taken_back(store: Store, mode: str) -> None:
    runtime = Breaking(RuntimeConfig(tree_budget=8), round_s=0.001)
    before = (await runtime.status()).config
    store.save(snapshot("bad", mode=mode, model=DEFAULT_MODEL))
    plan = await rollback.preview(store, "bad", runtime)
    with pytest.raises(RollbackFailed, match="the engine fell over; what ran before runs again"):
        await rollback.perform(store, plan, runtime)
    assert (await runtime.status()).config == before
    labels = [entry.label for entry in store.list().entries]
    assert labels[0].startswith("back to what ran before: rollback to") and labels[1:] == [
        "rollback to bad",
        "before rollback to bad",
        "bad",
    ]
    assert store.load("latest")[1].config["mode"] == "tree"


async def test_verify_and_bisect_name_where_it_fell(store: Store) -> None:
    runtime = fake()
    await saving.measure(store, await saving.save_running(store, runtime, request(label="v0")), runtime)
    steps: list[dict[str, Any]] = [
        {"top_k": 1},
        {"top_k": 2},
        {"mode": "off", "top_k": 3},
        {"top_k": 4},
        {"top_k": 5},
    ]
    for number, step in enumerate(steps, start=1):
        await change(runtime, **step)
        await saving.save_running(store, runtime, request(label=f"v{number}"))
    own = (await runtime.status()).config
    with pytest.raises(StoreRefused, match="runs another configuration"):
        await checks.verify(store, "v0", runtime)
    found = await checks.bisect(store, "v0", "v5", runtime)
    assert (found.good.label, found.bad.label) == ("v2", "v3")
    assert {each.name for each in found.settings} == {"mode", "top_k"}
    assert "mode tree -> off" in found.verdict and len(found.measured) < 6
    assert (await runtime.status()).config == own
    with pytest.raises(StoreRefused, match="nothing fell"):
        await checks.bisect(store, "v3", "v5", runtime)
    with pytest.raises(UnknownSnapshot, match="does not come before"):
        await checks.bisect(store, "v5", "v0", runtime)
    await rollback.perform(store, await rollback.preview(store, "v0", runtime), runtime)
    verified = await checks.verify(store, "v0", runtime)
    assert verified.holds is True and "figures are back" in verified.verdict


async def test_secrets_are_stopped_by_line(store: Store, site: Path) -> None:
    key = "sk-proj-" + "aB3dE5fG7hJ9kL1mN3pQ5rS7tU9vW1xY"
    with pytest.raises(SecretFound, match="note line 2"):
        await saving.save_resolved(store, {}, request(note=f"fine\nOPENAI_API_KEY={key}\n"))
    (site / "steps/core.py").write_text(f"a = 1\n\nAPI_KEY = '{key}'\n")
    with pytest.raises(SecretFound, match=r"steps/core.py line 3") as refused:
        await saving.save_resolved(store, {}, request(packages=(NAME,)))
    assert key not in str(refused.value) and refused.value.exit_code == 3
    assert store.list().entries == ()
    await saving.save_resolved(store, {}, request(packages=(NAME,), allow_secret=True))
    assert len(store.list().entries) == 1


async def test_patched_files_go_back_byte_for_byte(
    store: Store, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    vanilla = contents(site)
    await saving.save_resolved(store, {}, request(label="vanilla", packages=(NAME,)))
    patch(site)
    wanted = contents(site)
    saved = await saving.save_resolved(store, {}, request(label="patched", packages=(NAME,)))
    assert saved.trailers["patched-files"] == "5"
    (site / "steps/tree.py").write_text("BUDGET = 0\n")
    quietly = RollbackOptions(measure=False)
    for name, state in (("patched", wanted), ("vanilla", vanilla)):
        plan = await rollback.preview(store, name, options=quietly, config={})
        before = contents(site)
        assert plan.patches is not None and not plan.refusals
        assert contents(site) == before
        outcome = await rollback.perform(store, plan)
        assert contents(site) == state and outcome.files
        count = len(outcome.files)
        loads = f"(looked at in a fresh interpreter, which loads {count} of {count} restored files"
        assert loads in outcome.verdict and outcome.notes == ()
        assert store.list(limit=2).entries[1].kind == "auto"
    _install(site, tmp_path, "1.3.0")
    plan = await rollback.preview(store, "patched", config={})
    with pytest.raises(StoreRefused, match=r"1\.2\.0.*1\.3\.0|1\.3\.0.*1\.2\.0"):
        await rollback.perform(store, plan)
    plan = await rollback.preview(store, "patched", options=RollbackOptions(patches=False), config={})
    assert (await rollback.perform(store, plan)).files == ()


async def test_an_imported_snapshot_needs_trust(store: Store, site: Path, tmp_path: Path) -> None:
    patch(site)
    wanted = contents(site)
    await saving.save_resolved(
        store, {"mode": "tree"}, request(label="patched", note="n\r\n", packages=(NAME,))
    )
    transfer.export(store, "patched", tmp_path / "p.tar")
    other = Store.at(tmp_path / "other")
    taken = transfer.take_in(other, tmp_path / "p.tar")
    assert taken.foreign and taken.kind == "import" and taken.note == "n\r\n"
    (site / "steps/tree.py").write_text("BUDGET = 0\n")
    spoilt = contents(site)
    outcome = await rollback.perform(other, await rollback.preview(other, "patched", config={}))
    assert contents(site) == spoilt and outcome.files == ()
    with pytest.raises(StoreRefused, match="is not the commit of this snapshot"):
        await rollback.preview(other, taken.id, options=RollbackOptions(trust="0" * 40), config={})
    trusting = RollbackOptions(trust=taken.commit, measure=False)
    await rollback.perform(other, await rollback.preview(other, taken.id, options=trusting, config={}))
    assert contents(site) == wanted


async def test_restored_files_are_loaded_and_measured_in_a_fresh_interpreter(
    store: Store, site: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    config = tiny_config(tiny_folder / "target", tiny_folder / "drafter", tree_budget=4).model_dump()
    patch(site)
    (site / "steps/ops/extra.py").write_text("raise ValueError('no such card')\n")
    saved = await saving.save_resolved(store, config, request(label="patched", packages=(NAME,)))
    for path in ("steps/core.py", "steps/ops/extra.py"):
        (site / path).write_text("x = 0\n")
    outcome = await rollback.perform(store, await rollback.preview(store, "patched", config=config))
    assert (
        "(measured in a fresh interpreter, which loads 2 of 2 restored files with the right"
        in outcome.verdict
    )
    assert outcome.notes == ("steps/ops/extra.py cannot be imported: ValueError: no such card",)
    assert outcome.figure is not None and outcome.figure.tok_s and outcome.figure.mode == "tree"
    assert store.load(outcome.entry.id)[1].measurements.results[-1] == outcome.figure
    assert store.entry(saved.id).kind == "save"


async def test_a_file_that_changes_after_it_was_restored_is_called_not_back(
    store: Store, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await saving.save_resolved(store, {}, request(label="vanilla", packages=(NAME,)))
    original = (site / "steps/tree.py").read_text()
    (site / "steps/tree.py").write_text("BUDGET = 0\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    saving.Originals()._keep(digest(original.encode()), original.encode())
    plan = await rollback.preview(store, "vanilla", options=RollbackOptions(measure=False), config={})
    done = await rollback.carry_out(store, plan)
    (site / "steps/tree.py").write_text("BUDGET = 1\n")
    outcome = await rollback.judge(store, plan, done)
    assert outcome.back is False
    assert outcome.verdict.startswith("not back: other content is loaded than was restored: steps/tree.py")

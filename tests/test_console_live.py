"""The Live screen: a row for each GPU at any width, the list of requests, events, what an operator is told."""

from __future__ import annotations

import time

import pytest
from console_driver import LONG, Driven, console
from fake_nvml import GIB, FakeNvml
from fake_runtime import FakeRuntime

from console.dialogs import ConfirmDialog
from console.filtering import wanted
from console.gpu_panel import COLUMNS, fitting, gpus_text
from console.live_screen import LiveScreen
from console.request_list import RequestTable, rows_of
from runtime.interface import GpuSample, RequestStats
from runtime.telemetry import HostSampler

HOSTILE = "[red]\x1b[31m\x00‮👩‍👩‍👧 שלום"


def healthy(**changes: object) -> GpuSample:
    values: dict[str, object] = {
        "index": 0,
        "name": "NVIDIA H200",
        "utilisation": 0.93,
        "memory_used": 61 * GIB,
        "memory_total": 140 * GIB,
        "power_w": 512.0,
        "power_limit_w": 700.0,
        "temperature_c": 54.0,
        "sm_clock_mhz": 1980,
        "memory_clock_mhz": 3201,
        "pcie_rx_b_s": 2.0 * 2**20,
        "pcie_tx_b_s": 1.0 * 2**20,
        "nvlink_rx_b_s": 1.0 * GIB,
        "nvlink_tx_b_s": 0.5 * GIB,
        "throttle": ("power cap",),
        "processes": (),
    }
    ages = dict.fromkeys((name for name in values if name not in ("index", "name")), 0.2)
    return GpuSample(**(values | {"ages": ages} | changes))  # type: ignore[arg-type]


VALUES = (
    "93 %",
    "61.0 of 140 GiB",
    "512/700 W",
    "54 °C",
    "1980",
    "power cap",
    "3201",
    "2.0/1.0 MiB/s",
    "1.0/0.5 GiB/s",
    "0 of 0",
)


@pytest.mark.parametrize("width", [10, 40, 77, 108, 117, 160])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_every_gpu_has_a_line_and_every_value_is_there_when_asked_for(width: int, count: int):
    gpus = [healthy(index=index) for index in range(count)]
    short = gpus_text(gpus, width, False, 0.1).plain.splitlines()
    assert len(short) == 1 + count
    if width >= 40:
        assert all(len(line) <= width for line in short)
    long = gpus_text(gpus, width, True, 0.1).plain
    for value in VALUES:
        assert long.count(value) == count, value
    assert long.count("<1 s") == count, "the age of the readings"
    assert gpus_text(gpus, width, True, 2.9).plain.count("3 s") == count, "and of the sample they came in"


def test_at_80_columns_what_matters_most_is_on_the_line_and_at_160_everything():
    assert [column.title for column in COLUMNS[: fitting(77)]][-2:] == ["SM MHz", "throttled by"]
    assert fitting(160) == len(COLUMNS)


@pytest.mark.case("B1")
def test_what_a_gpu_does_not_tell_is_not_available_and_never_zero():
    text = gpus_text([GpuSample(index=0, name="GB10")], 160, True, 0.0).plain
    assert text.splitlines()[1].split() == ["0", *["n/a"] * len(COLUMNS), "n/a"]


@pytest.mark.case("B1")
def test_mig_instances_are_told_apart_and_other_names_are_shown():
    parts = [
        healthy(),
        GpuSample(index=0, instance=1, name="MIG 1 NVIDIA H200", memory_used=GIB, memory_total=10 * GIB),
    ]
    lines = gpus_text(parts, 120, False, 0.0).plain.splitlines()
    assert [line.split()[0] for line in lines] == ["GPU", "0", "NVIDIA", "0:1", "MIG"]
    assert "1.0 of 10.0 GiB" in lines[3]


@pytest.mark.case("B2")
def test_a_lost_gpu_and_an_old_value_say_so():
    old = healthy(index=1, ages={"power_w": 33.0, "utilisation": 0.1}, state="power is slow to read (0.2 s)")
    lost = GpuSample(index=2, name="NVIDIA H200", state="lost, last reading 09:12:13")
    text = gpus_text([healthy(), old, lost], 117, False, 0.0).plain
    assert "old: power 33 s" in text and "power is slow to read (0.2 s)" in text
    assert text.splitlines()[-1].startswith("2    lost, last reading 09:12:13")


def test_a_filter_has_words_and_words_that_must_not_be():
    holds = wanted("Error !gpu")
    assert holds("an ERROR of the disk") and not holds("an error of GPU 1") and not holds("all is well")
    assert wanted("")("anything") and wanted("!")("anything")


def stats(request_id: str, **changes: object) -> RequestStats:
    values: dict[str, object] = {
        "state": "decoding",
        "client": "127.0.0.1",
        "mode": "tree",
        "tree_budget": 11,
        "temperature": 0.7,
        "prompt_tokens": 120,
        "cached_tokens": 0,
        "output_tokens": 33,
        "rounds": 10,
        "num_correct_drafts": 22,
        "accept_length": 3.2,
        "age_s": 4.0,
        "last_token_age_s": 0.03,
    }
    return RequestStats(request_id=request_id, **(values | changes))  # type: ignore[arg-type]


def done(request_id: str, **changes: object) -> RequestStats:
    return stats(
        request_id, **({"state": "finished", "finish_reason": "stop", "last_token_age_s": None} | changes)
    )


class Listing(FakeRuntime):
    """A runtime with the requests a test gives it; what is cancelled is noted."""

    def __init__(self, *requests: RequestStats) -> None:
        super().__init__()
        self.listed = requests
        self.cancelled: list[str] = []

    async def requests(self) -> tuple[RequestStats, ...]:
        return self.listed

    async def cancel(self, request_id: str) -> bool:
        self.cancelled.append(request_id)
        return True


def table(driven: Driven) -> RequestTable:
    return driven.app.screen.query_one(RequestTable)


def test_rows_have_every_figure_and_ids_may_come_again():
    rows = rows_of([stats("a"), done("a", workload="code", plain_reason="context full"), done(HOSTILE)])
    assert len({row.key for row in rows}) == 3
    assert rows[0].cells[:9] == (
        "a",
        "decoding",
        "4.0 s",
        "120",
        "33",
        "tree 11",
        "3.20",
        "30 ms",
        "127.0.0.1",
    )
    assert rows[1].cells[1] == "done: stop" and "context full" in rows[1].cells
    assert "\x1b" not in rows[2].cells[0] and "\x00" not in rows[2].cells[0]


async def test_requests_are_listed_chosen_opened_filtered_and_cancelled_after_asking():
    runtime = Listing(stats("first"), stats("second", client="batch"), done("third"), done(HOSTILE))
    opened: list[str] = []
    async with console(runtime, size=(80, 24)) as driven:

        async def open_tree(request_id: str) -> None:
            opened.append(request_id)

        driven.app.action_open_tree = open_tree  # type: ignore[method-assign]
        await driven.press("x")
        assert "r on the Live screen goes to the requests of others" in driven.app.view.notice
        await driven.press("r")
        await driven.until(lambda: table(driven).row_count == 4, "listed")
        await driven.press("j", "enter")
        await driven.until(lambda: opened == ["second"], "opened")
        await driven.press("x")
        await driven.until(lambda: isinstance(driven.app.screen, ConfirmDialog), "asked")
        await driven.press("enter")
        await driven.until(lambda: isinstance(driven.app.screen, LiveScreen), "the safe button has the focus")
        assert runtime.cancelled == []
        await driven.press("x")
        await driven.until(lambda: isinstance(driven.app.screen, ConfirmDialog), "asked again")
        await driven.press("y")
        await driven.until(lambda: runtime.cancelled == ["second"], "cancelled")
        await driven.until(lambda: "request second is cancelled" in driven.app.view.notice, "told")
        await driven.press("G", "k", "x")
        await driven.until(lambda: "third has ended already" in driven.app.view.notice, "nothing to cancel")
        await driven.press("slash", *"batch x")
        await driven.until(lambda: table(driven).row_count == 0, "letters are text, nothing has both words")
        await driven.press("backspace", "backspace", "enter")
        await driven.until(lambda: table(driven).row_count == 1, "one has")
        assert "'batch'" in str(table(driven).border_title)
        await driven.press("slash", "escape")
        await driven.until(lambda: table(driven).row_count == 4, "all again")
        await driven.press("escape")
        assert driven.app.focused is None


async def test_a_read_only_console_cancels_no_request():
    runtime = Listing(stats("first"))
    async with console(runtime, read_only=True) as driven:
        await driven.press("r")
        await driven.until(lambda: table(driven).row_count == 1, "listed")
        await driven.press("x")
        await driven.until(lambda: "read-only" in driven.app.view.notice, "refused")
        assert runtime.cancelled == [] and isinstance(driven.app.screen, LiveScreen)


async def test_the_chosen_request_stays_chosen_when_others_come_and_go(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("console.bridge.STATUS_S", 0.05)
    runtime = Listing(stats("a"), stats("b"), stats("c"))
    runtime._running["kept busy"] = None  # type: ignore[assignment]
    async with console(runtime) as driven:
        await driven.press("r")
        await driven.until(lambda: table(driven).row_count == 3, "listed")
        await driven.press("j")
        runtime.listed = (stats("new"), stats("newer"), stats("b", output_tokens=99), done("a"))
        await driven.until(lambda: table(driven).row_count == 4, "listed again")
        await driven.until(lambda: "99" in driven.shown(), "figures follow")
        assert table(driven).cursor_row == 2
        runtime._running.clear()


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
async def test_eight_gpus_are_readable_at_every_size_and_after_a_tiny_one(size: tuple[int, int]):
    runtime = FakeRuntime(answer=LONG, round_s=0.03)
    sample = HostSampler(nvml=lambda: FakeNvml(gpus=8)).sample()
    async with console(runtime, size=size) as driven:
        await driven.ask("hello")
        await driven.streaming()
        await driven.press("escape", "1")
        runtime.emit(sample)
        await driven.until(lambda: "8 x NVIDIA H200" in driven.shown(), "the GPUs")
        await driven.pilot.resize_terminal(10, 3)
        await driven.pilot.pause(0.1)
        await driven.pilot.resize_terminal(*size)
        await driven.until(lambda: "8 x NVIDIA H200" in driven.shown(), "the GPUs again")

        def gpus() -> list[str]:
            wanted = ("512/700 W", "power cap", "1980")
            return [line for line in driven.shown().splitlines() if all(word in line for word in wanted)]

        await driven.until(lambda: len(gpus()) == 8, "drawn")
        await driven.pilot.pause()
        before = driven.text("#host").count("\n")
        await driven.press("v")
        await driven.until(lambda: driven.text("#host").count("\n") != before, "all values, or fewer")
        histogram = driven.app.screen.query_one("#histogram")
        histogram.scroll_visible(animate=False)
        await driven.until(lambda: "accept length of" in str(histogram.border_title), "drawn once it is seen")
        await driven.answered()


async def test_latency_speaks_of_how_many_requests_and_prefill_stands_apart():
    runtime = FakeRuntime(answer="one two three four five six", round_s=0.001)
    async with console(runtime) as driven:
        await driven.ask("hello")
        await driven.answered()
        await driven.press("escape", "1")
        await driven.until(
            lambda: driven.app.screen.query_one("#latency").border_title == "latency, last 1 finished",
            "counted",
        )
        assert "TTFT" in driven.text("#latency") and "p99" in driven.text("#latency")
        runtime.emit(
            runtime._round(3).model_copy(
                update={"prefill_tokens": 500, "prefill_s": 0.5, "time_s": time.time()}
            )
        )
        await driven.until(lambda: "1000 now" in driven.text("#speed"), "prefill")


async def test_an_alarm_is_on_the_screen_and_once_among_the_events():
    runtime = FakeRuntime(answer=LONG * 3, round_s=0.01)
    async with console(runtime, size=(120, 40)) as driven:

        def useless(emitted: int):
            return FakeRuntime._round(runtime, 1)

        runtime._round = useless  # type: ignore[method-assign]
        await driven.ask("hello")
        await driven.press("escape", "1")
        await driven.until(lambda: "ALARM: almost no draft" in driven.text("#speed"), "alarm")
        await driven.until(lambda: "ALARM" in driven.text("#events"), "an event")
        await driven.pilot.pause(0.7)
        assert driven.text("#events").count("ALARM") == 1


async def test_opening_a_request_shows_its_tree():
    async with console() as driven:
        await driven.app.action_open_tree("r1")
        assert driven.app.screen is driven.app.trees and driven.app.trees._chosen == "r1"

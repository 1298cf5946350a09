"""Speed and acceptance figures from rounds, and how figures and foreign text are printed."""

from __future__ import annotations

import pytest
from textual.app import App, ComposeResult

from console import formats
from console.charts import TimeChart, dots
from console.conversation import History
from console.figures import Figures, RoundWindow
from console.host_window import HostWindow
from console.keys import next_budget, next_mode
from console.latency import KEEP, Latency, RequestWindow
from console.speed_panel import latency_text
from console.verdict import alarm, measured, verdict
from runtime.interface import Baseline, GpuSample, HostSample, RequestStats, RoundStats

START = 1_000_000.0
PLAIN = Baseline(mode="off", tree_budget=0, tok_s=20.0, measured_at_s=START, conditions="1 request, T 0")


def rounds(
    *,
    at: float = START,
    count: int = 20,
    gap_s: float = 0.1,
    emitted: int = 4,
    first_index: int = 0,
    mode: str = "tree",
    budget: int = 11,
    depth: int = 7,
) -> tuple[RoundStats, ...]:
    """`count` rounds of one sequence, one every `gap_s`, the first ending at `at` + gap_s."""
    part = gap_s / 5
    return tuple(
        RoundStats(
            index=first_index + number,
            time_s=at + (number + 1) * gap_s,
            mode=mode,
            tree_budget=budget,
            batch=1,
            nodes=budget + 1,
            emitted=emitted,
            accept_lengths=(emitted,),
            draft_depths=(depth,),
            stage_s=(part,) * 5,
            slots_used=1,
            slots_total=2,
        )
        for number in range(count)
    )


@pytest.mark.case("A30")
def test_speed_counts_tokens_not_chunks_and_leaves_idle_time_out():
    window = RoundWindow()
    window.add(rounds())
    figures = window.figures(START + 2.0)
    assert figures.tok_s == pytest.approx(40.0)
    idle = window.figures(START + 12.0)
    assert idle.idle and idle.tok_s is None and idle.accept_length is None
    assert idle.tok_s_mean == pytest.approx(40.0)
    assert idle.stages_s == pytest.approx(figures.stages_s) and idle.nodes == figures.nodes
    window.add(rounds(at=START + 12.0, first_index=20))
    again = window.figures(START + 14.0)
    assert again.tok_s == pytest.approx(40.0)
    assert again.tok_s_mean == pytest.approx(40.0)
    assert (again.tok_s_peak or 0) >= (again.tok_s_mean or 0)


def test_the_moments_between_requests_one_after_the_other_are_no_decoding():
    window = RoundWindow()
    for request in range(10):
        first, *others = rounds(at=START + 0.05 * request, count=30, gap_s=0.001, first_index=30 * request)
        window.add([first.model_copy(update={"prefill_tokens": 40, "prefill_s": 0.002}), *others])
    assert window.figures(START + 0.5).tok_s_mean == pytest.approx(4000.0)


def test_the_series_has_holes_where_nothing_was_decoded():
    window = RoundWindow()
    window.add(rounds())
    window.add(rounds(at=START + 12.0, first_index=20))
    series = window.figures(START + 14.0).tok_s_series
    assert series[-1] is not None and series[-15] is not None
    assert all(value is None for value in series[-11:-3])


@pytest.mark.case("A30")
@pytest.mark.parametrize("speeds", [(1, 8, 3), (8, 1, 1), (2, 2, 2)])
def test_the_peak_is_never_under_the_mean(speeds: tuple[int, ...]):
    window = RoundWindow()
    for number, emitted in enumerate(speeds):
        window.add(rounds(at=START + number * 5, count=37, emitted=emitted, first_index=number * 37))
    figures = window.figures(START + 14.0)
    assert (figures.tok_s_peak or 0) >= (figures.tok_s_mean or 0) > 0


def test_a_round_that_was_not_seen_does_not_count_as_waiting():
    window = RoundWindow()
    window.add(rounds(count=10))
    window.add(rounds(at=START + 1.1, count=10, first_index=11))
    assert window.figures(START + 2.1).tok_s == pytest.approx(40.0)


def test_acceptance_by_position_is_a_share_of_the_rounds_that_drafted_it():
    window = RoundWindow()
    window.add(rounds(count=3, emitted=4, depth=7))
    window.add(rounds(at=START + 0.3, count=1, emitted=1, depth=2, first_index=3))
    shares = window.figures(START + 0.5).by_position
    assert shares == (0.75, 0.75, 1.0, 0.0, 0.0, 0.0, 0.0)
    assert window.figures(START + 0.5).accept_length == pytest.approx(13 / 4)


def test_a_flip_starts_figures_afresh_and_keeps_the_ones_before():
    window = RoundWindow()
    window.add(rounds(emitted=4))
    window.add(rounds(at=START + 2.0, emitted=2, mode="chain", first_index=20))
    figures = window.figures(START + 4.0)
    assert figures.accept_mean == pytest.approx(2.0)
    assert figures.before is not None and str(figures.before.setting) == "tree 11"
    assert figures.before.tok_s == pytest.approx(40.0)
    assert figures.before.accept_length == pytest.approx(4.0)


def decoding(**changes: object) -> Figures:
    window = RoundWindow()
    window.add(rounds(**changes))  # type: ignore[arg-type]
    return window.figures(START + 2.0)


@pytest.mark.case("A33")
@pytest.mark.parametrize(
    ("figures", "baseline", "speculation", "words"),
    [
        (decoding(), PLAIN, "ready", "speculation pays: 2.00x plain"),
        (
            decoding(emitted=1),
            PLAIN,
            "ready",
            "loses: 0.50x plain; m steps on to mode off, [ lowers the budget",
        ),
        (decoding(emitted=1, mode="chain"), PLAIN, "ready", "loses: 0.50x plain; m steps on to mode off"),
        (decoding(emitted=2), PLAIN, "ready", "speculation makes no difference: 1.00x plain"),
        (decoding(emitted=2, mode="off"), PLAIN, "ready", "speculation is off"),
        (decoding(emitted=2, budget=0), PLAIN, "ready", "speculation is off"),
        (decoding(), None, "ready", "n/a, plain decoding is not measured yet"),
        (decoding(), PLAIN, "inactive: no drafter", "speculation inactive: no drafter"),
        (Figures(), PLAIN, "ready", "idle"),
    ],
)
def test_the_verdict_in_words(figures: Figures, baseline: Baseline | None, speculation: str, words: str):
    assert words in verdict(figures, baseline, speculation)


def test_what_auto_plays_is_one_stretch_and_no_alarm_of_it():
    played = [
        *rounds(mode="tree", emitted=1),
        *rounds(mode="off", emitted=1, at=START + 2.0, first_index=20, depth=0),
    ]
    window = RoundWindow()
    window.add(each.model_copy(update={"auto": True}) for each in played)
    figures = window.figures(START + 4.0)
    assert str(figures.setting) == "auto" and figures.rounds == 40 and figures.before is None
    assert alarm(figures, {"temperature": 0.0}) is None
    assert "auto decodes at 0.50x the plain baseline" in verdict(figures, PLAIN, "ready")


def test_a_batch_of_several_settings_says_so():
    window = RoundWindow()
    window.add(each.model_copy(update={"mixed": True}) for each in rounds(mode="off"))
    setting = window.figures(START + 2.0).setting
    assert str(setting) == "off and others" and not setting.plain


@pytest.mark.parametrize(
    ("ago_s", "words"),
    [(-5, "just now"), (59, "just now"), (61, "1 min ago"), (7300, "2 h ago"), (4 * 86400, "4 d ago")],
)
def test_the_age_of_a_figure_in_its_largest_unit(ago_s: float, words: str):
    assert formats.age(START - ago_s, START) == words


def test_several_requests_are_not_compared_with_a_baseline_of_one():
    both = [stats.model_copy(update={"accept_lengths": (4, 4), "draft_depths": (7, 7)}) for stats in rounds()]
    window = RoundWindow()
    window.add(both)
    assert "n/a with 2.0 requests together" in verdict(window.figures(START + 2.0), PLAIN, "ready")


def test_the_latest_plain_baseline_counts():
    later = PLAIN.model_copy(update={"measured_at_s": START + 5, "tok_s": 30.0})
    chain = later.model_copy(update={"mode": "chain"})
    assert measured([later, PLAIN, chain], "off") == later
    assert measured([chain], "off") is None


def test_unknown_is_never_zero():
    unknown = (
        formats.rate(None),
        formats.number(float("nan")),
        formats.count(None),
        formats.percent(None),
        formats.duration(None),
        formats.size(None),
        formats.used_of(None, None),
        formats.temperature(None),
    )
    assert set(unknown) == {"n/a"}
    assert formats.used_of(None, 2**30) == "n/a of 1.0 GiB"
    assert formats.used_of(2**29, 2**31) == "512 MiB of 2.0 GiB"
    assert formats.used_of(2**30, 2**31) == "1.0 of 2.0 GiB"
    assert (formats.percent(0.0), formats.rate(0.0), formats.size(0)) == ("0 %", "0.0", "0 B")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0031, "3.1 ms"), (0.41, "410 ms"), (3.25, "3.2 s"), (119.0, "119.0 s"), (125.0, "2 min 5 s")],
)
def test_durations(seconds: float, text: str):
    assert formats.duration(seconds) == text


@pytest.mark.parametrize("share", [None, -1.0, 0.0, 0.01, 0.5, 1.0, 7.0, float("nan")])
@pytest.mark.parametrize("width", [-3, 0, 1, 2, 17])
def test_a_bar_fills_exactly_its_width(share: float | None, width: int):
    assert len(formats.bar(share, width)) == max(width, 0)


def test_foreign_text_keeps_its_words_and_loses_its_powers():
    assert formats.clean_text("a\x1b[2Jb\x00\r\nc\td\x9bq\u202e\ud800") == "a␛[2Jb␀\nc    d\ufffdq\ufffd"
    # Joiners go: terminals disagree on how wide a joined emoji is, and a line would shift.
    assert formats.clean_text("שלום 👩‍👩‍👧 日本") == "שלום 👩👩👧 日本"
    assert formats.clean_line("x" * 10**6) == "x" * 399 + "…"
    assert formats.clean_line("a\nb") == "a b"


def test_steps_of_the_budget():
    assert next_budget({"tree_budget": 11, "max_tree_budget": 64}, 1, None) == {"tree_budget": 16}
    assert next_budget({"tree_budget": 13, "max_tree_budget": 64}, -1, None) == {"tree_budget": 11}
    assert next_budget({"tree_budget": None, "max_tree_budget": 64}, 1, 24) == {"tree_budget": 32}
    assert "not chosen yet" in str(next_budget({"tree_budget": None}, 1, None))
    assert next_mode({"mode": "tree"}) == {"mode": "auto"} and next_mode({"mode": "auto"}) == {"mode": "off"}


def test_history_walks_back_and_returns_the_draft():
    history = History()
    assert history.older("typed") is None
    history.add("one")
    history.add("one")
    history.add("two")
    assert [history.older("typed"), history.older(""), history.older("")] == ["two", "one", None]
    assert [history.newer(), history.newer(), history.newer()] == ["two", "typed", None]


def test_prefill_is_counted_apart_and_takes_nothing_from_decoding():
    window = RoundWindow()
    window.add(rounds(count=10))
    late = rounds(at=START + 1.2, count=10, first_index=10)
    with_prompt = late[0].model_copy(update={"prefill_tokens": 300, "prefill_s": 0.2})
    window.add((with_prompt, *late[1:]))
    figures = window.figures(START + 2.2)
    assert figures.tok_s == pytest.approx(40.0)
    assert figures.prefill_tok_s == figures.prefill_mean == figures.prefill_peak == pytest.approx(1500.0)
    assert window.figures(START + 60.0).prefill_tok_s is None


def test_accept_lengths_are_counted_for_the_present_setting():
    window = RoundWindow()
    window.add(rounds(emitted=2, mode="chain", count=4))
    window.add(rounds(at=START + 0.4, count=3, emitted=4, first_index=4))
    window.add(rounds(at=START + 0.7, count=1, emitted=1, first_index=7))
    figures = window.figures(START + 1.0)
    assert (figures.accept_counts, figures.rounds) == ((0, 1, 0, 0, 3), 4)


@pytest.mark.parametrize(
    ("figures", "config", "words"),
    [
        (decoding(emitted=1, count=30), {"temperature": 0.0}, "not trained for this target"),
        (decoding(emitted=1, count=30), {"temperature": 1.4}, "because T is 1.4: t lowers it"),
        (decoding(emitted=1, count=5), {"temperature": 0.0}, None),
        (decoding(emitted=2, count=30), {"temperature": 0.0}, None),
        (decoding(emitted=1, count=30, mode="off", depth=0), {"temperature": 0.0}, None),
        (Figures(), {}, None),
    ],
)
def test_an_alarm_where_almost_nothing_is_accepted_names_the_cause_and_the_key(
    figures: Figures, config: dict[str, float], words: str | None
):
    told = alarm(figures, config)
    assert (told is None) if words is None else (words in str(told) and "m steps on to mode off" in str(told))


def finished(number: int, **changes: object) -> RequestStats:
    values: dict[str, object] = {
        "finish_reason": "stop",
        "ttft_s": number / 100,
        "decode_s": 1.0,
        "output_tokens": 11,
    }
    return RequestStats(
        request_id=f"r{number}",
        mode="tree",
        tree_budget=11,
        temperature=0.0,
        prompt_tokens=10,
        cached_tokens=0,
        rounds=5,
        num_correct_drafts=5,
        accept_length=2.0,
        queue_s=0.0,
        **(values | changes),  # type: ignore[arg-type]
    )


def test_percentiles_are_values_that_occurred_among_the_last_finished_requests():
    window = RequestWindow()
    assert window.latency == Latency()
    window.add(finished(number) for number in range(1, 101))
    window.add(finished(number) for number in range(91, 101))
    window.add([finished(200, finish_reason="cancelled"), finished(201, finish_reason="error")])
    latency = window.latency
    assert latency.requests == 100, "neither twice nor cut short"
    assert latency.ttft.values == (0.5, 0.9, 0.99)
    assert latency.tpot.values == (0.1, 0.1, 0.1)
    assert latency.end_to_end.values == (1.5, 1.9, 1.99)
    window.add(finished(number) for number in range(300, 700))
    assert window.latency.requests == KEEP


def test_a_request_of_one_token_has_no_time_per_output_token():
    window = RequestWindow()
    window.add([finished(1, output_tokens=1, decode_s=0.0), finished(2)])
    latency = window.latency
    assert (latency.requests, latency.ttft.count, latency.tpot.count) == (2, 2, 1)
    assert "TPOT         100 ms   100 ms   100 ms of 1" in latency_text(latency).plain


def test_the_hosts_load_is_the_mean_over_its_gpus_or_its_cpu():
    window = HostWindow()
    gpus = tuple(GpuSample(index=i, name="x", utilisation=share) for i, share in enumerate((0.2, 0.6, None)))
    window.add(HostSample(host="h", time_s=START, cpu=0.1))
    assert window.busy(START).words == "CPU %" and window.busy(START).series[-1] == pytest.approx(10.0)
    for _ in range(10):
        window.add(HostSample(host="h", time_s=START + 1, cpu=0.1, gpus=gpus))
    busy = window.busy(START + 2)
    assert busy.words == "GPU util %, mean of 2"
    assert busy.series[-1] is None and busy.series[-2] == pytest.approx(40.0) and busy.series[-3] is None


def test_a_curve_joins_neighbours_leaves_holes_open_and_reaches_from_bottom_to_top():
    def drawn(*values: float | None, height: int = 1) -> list[str]:
        return ["".join(chr(0x2800 + cell) for cell in row) for row in dots(values, 1.0, height)]

    assert drawn(0.0, 1.0) == ["⡸"] and drawn(1.0, 0.0) == ["⢱"]
    assert drawn(0.0, None, 1.0, 1.0) == ["⡀⠉"]
    assert drawn(1.0, 0.5, height=2) == ["⢱", "⠀"] and drawn(None, None, height=2) == ["⠀", "⠀"]
    assert drawn(7.0, -1.0, height=2)[0][0] == "⢱", "what is out of range stays in the picture"


class Chart(App[None]):
    def compose(self) -> ComposeResult:
        yield TimeChart("tok/s", id="chart")


@pytest.mark.case("C5")
@pytest.mark.parametrize("colour", [True, False])
@pytest.mark.parametrize("size", [(1, 1), (2, 1), (1, 30), (11, 2), (12, 3), (80, 24)])
async def test_charts_draw_at_any_size_with_and_without_colour(
    size: tuple[int, int], colour: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("NO_COLOR", raising=False)
    if not colour:
        monkeypatch.setenv("NO_COLOR", "1")
    async with Chart().run_test(size=size) as pilot:
        chart = pilot.app.query_one(TimeChart)
        for values in ((), (None,) * 300, (1.0,), (None, 3.0, None, 0.0, 5.0), (0.0,) * 300):
            chart.show(values, level=2.0)
            await pilot.pause()
        if size == (80, 24):
            assert chart.border_title == "tok/s, 148 s"
        chart.styles.width = 0
        await pilot.pause()
        chart.show((1.0, 2.0))
        await pilot.pause()

"""One page from results of bench and tune: what an engineer would write by hand, every figure with its conditions.

A page is a list of blocks (headings, sentences, tables, plots), which Markdown and HTML are written from.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from runtime.interface import Mode
from runtime.load_report import LoadReport, LoadResult, Spread
from runtime.race import Arm, Gain
from runtime.report_plots import Bar, Line, bars, lines
from runtime.tune import TuneReport

KNOWN_SCHEMA = 1


class ReportFileError(ValueError):
    """A file that is no result file; names it and what is wrong."""


@dataclass(frozen=True)
class Heading:
    text: str
    level: int


@dataclass(frozen=True)
class Sentence:
    text: str


@dataclass(frozen=True)
class Table:
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Plot:
    svg: str
    title: str


Block = Heading | Sentence | Table | Plot


def read_result(path: Path) -> dict[str, Any]:
    """A result file of `ddtree bench` or `ddtree tune`; a saved answer whose last line is the JSON serves too."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as bad:
        raise ReportFileError(
            f"result file {path} cannot be read: {getattr(bad, 'strerror', None) or bad}"
        ) from None
    try:
        answer = json.loads(text)
    except ValueError:
        try:
            answer = json.loads(text.splitlines()[-1])
        except (ValueError, IndexError):
            raise ReportFileError(
                f"result file {path} is not JSON; write it with ddtree bench --output"
            ) from None
    if not isinstance(answer, dict) or not isinstance(answer.get("results"), list):
        raise ReportFileError(f"result file {path} is none of ddtree bench or ddtree tune: it has no results")
    if answer.get("schema") != KNOWN_SCHEMA:
        raise ReportFileError(
            f"result file {path} has schema {answer.get('schema')}, this version reads {KNOWN_SCHEMA}; update ddtree"
        )
    return answer


def page(
    results: Sequence[tuple[str, Mapping[str, Any]]],
    title: str,
    snapshots: Sequence[Block] = (),
    number: int = 0,
) -> list[Block]:
    """The blocks of a page over results, each with the name of its file. Raises ReportFileError.

    `snapshots`: what is to be said of `number` snapshots, which stands last.
    """
    writers: dict[str, Callable[[Mapping[str, Any]], Iterator[Block]]] = {
        "comparison": _comparison,
        "load": _load,
        "tune": _tune,
    }
    sources = [f"{len(results)} result file(s)"] * bool(results) + [f"{number} snapshot(s)"] * bool(number)
    written = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    blocks: list[Block] = [Heading(title, 1), Sentence(f"Written {written} from {' and '.join(sources)}.")]
    for name, answer in results:
        kind = str(answer.get("kind", "comparison"))
        if kind not in writers:
            raise ReportFileError(f"result file {name} is of a kind this version does not know: {kind}")
        measured = answer.get("conditions", {}).get("measured_at", "n/a")
        blocks += [Heading(f"{kind.capitalize()}: {name}, measured {measured}", 2)]
        try:
            blocks += list(writers[kind](answer))
        except (ValidationError, KeyError, TypeError, AttributeError) as bad:
            problem = bad.errors()[0]["msg"] if isinstance(bad, ValidationError) else repr(bad)
            raise ReportFileError(f"result file {name} is not whole: {problem}") from None
        blocks += list(_conditions(answer.get("conditions", {})))
    return [*blocks, *snapshots]


def _comparison(answer: Mapping[str, Any]) -> Iterator[Block]:
    rows = answer["results"]
    loads = dict.fromkeys((row["concurrency"], row["temperature"]) for row in rows)
    for users, temperature in loads:
        here = [row for row in rows if (row["concurrency"], row["temperature"]) == (users, temperature)]
        here.sort(key=lambda row: -row["tok_s"])
        best, where = here[0], f"{_users(users)}, temperature {temperature:g}"
        gain = f", {best['speed_up']:.2f} times plain decoding" if best.get("speed_up") else ""
        yield Sentence(f"At {where} {_name(best)} is fastest: {best['tok_s']:.1f} tok/s a user{gain}.")
        longest = max(here, key=lambda row: row["accept_length"])
        if longest is not best:
            yield Sentence(
                f"{_name(longest)} accepts most ({longest['accept_length']:.2f} tokens a round against "
                f"{best['accept_length']:.2f}) and is slower: {longest['tok_s']:.1f} tok/s."
            )
        yield Plot(
            bars(
                f"tok/s a user, {where}",
                [Bar(_name(row), row["tok_s"], _speed(row)) for row in here],
            ),
            f"tok/s a user, {where}",
        )
    yield Table(
        (
            "setting",
            "users",
            "T",
            "tok/s a user",
            "least to most",
            "x plain",
            "accept length",
            "TTFT",
            "round",
            "n",
        ),
        tuple(
            (
                _name(row),
                str(row["concurrency"]),
                f"{row['temperature']:g}",
                f"{row['tok_s']:.1f}",
                f"{row['tok_s_min']:.1f} to {row['tok_s_max']:.1f}",
                f"{row['speed_up']:.2f}" if row.get("speed_up") else "n/a",
                f"{row['accept_length']:.2f}",
                seconds(row["ttft_s"]),
                seconds(row["round_s"]),
                str(row["repetitions"]),
            )
            for row in rows
        ),
    )
    yield Sentence(
        "tok/s: tokens after the first per second of decoding, per request, medians of interleaved repetitions; "
        "accept length: tokens a round, bonus token included."
    )
    for note in answer.get("notes", ()):
        yield Sentence(str(note))


def _load(answer: Mapping[str, Any]) -> Iterator[Block]:
    report = LoadReport.model_validate(answer)
    fastest = max(report.results, key=lambda each: each.total_tok_s, default=None)
    if fastest is not None:
        yield Sentence(f"Most tokens a second: {fastest.total_tok_s:.1f} in all, {_load_name(fastest)}.")
    for each in report.results:
        if each.failed:
            reasons = "; ".join(f"{count} x {reason}" for reason, count in each.errors.items())
            yield Sentence(
                f"{_load_name(each)}: {each.failed} of {each.requests} requests failed ({reasons})."
            )
        if each.goodput_share is not None and each.slo is not None:
            limits = ", ".join(
                f"{name} {seconds(value)}" for name, value in each.slo.model_dump().items() if value
            )
            yield Sentence(f"{_load_name(each)}: {each.goodput_share:.0%} of the answers kept to {limits}.")
    for figure, name in (("ttft_s", "time to first token"), ("tpot_s", "time per token after the first")):
        drawn = list(_latency_lines(report.results, figure))
        if drawn:
            title = f"{name}, p50 and p99, by load"
            yield Plot(lines(title, "users or requests per second", "s", drawn), title)
    yield Table(
        ("load", "n", "failed", "answers/s", "tok/s in all", "tok/s a user p50", "TTFT p50", "TTFT p99")
        + ("TPOT p50", "TPOT p99", "longest pause p99", "end to end p99", "good/s", "J/token"),
        tuple(
            (
                _load_name(each),
                str(each.requests),
                str(each.failed),
                f"{each.request_rate:.2f}",
                f"{each.total_tok_s:.1f}",
                _at(each.user_tok_s, "p50", lambda value: f"{value:.1f}"),
                _at(each.ttft_s, "p50"),
                _at(each.ttft_s, "p99"),
                _at(each.tpot_s, "p50"),
                _at(each.tpot_s, "p99"),
                _at(each.gap_s, "p99"),
                _at(each.e2e_s, "p99"),
                "-" if each.goodput_per_s is None else f"{each.goodput_per_s:.2f}",
                "n/a" if each.energy_j_per_token is None else f"{each.energy_j_per_token:.3g}",
            )
            for each in report.results
        ),
    )
    yield Sentence(
        "TTFT and end to end count from the moment a request was due; tok/s in all over the whole duration."
    )
    for note in report.notes:
        yield Sentence(note)


def _latency_lines(results: Sequence[LoadResult], figure: str) -> Iterator[Line]:
    """p50 and p99 over the loads of each loop and setting, where there are at least two."""
    series: dict[str, list[LoadResult]] = {}
    for each in results:
        series.setdefault(f"{each.loop} {_setting(each)}".strip(), []).append(each)
    for name, members in series.items():
        for share in ("p50", "p99"):
            points = tuple(
                (float(each.rate or each.concurrency or 0), getattr(spread, share))
                for each in members
                if (spread := getattr(each, figure)) is not None
            )
            if len(points) > 1:
                yield Line(f"{name} {share}", points)


def _tune(answer: Mapping[str, Any]) -> Iterator[Block]:
    fields = {name: value for name, value in answer.items() if name not in ("schema", "kind")}
    report = TuneReport.model_validate(fields)
    chosen = Arm(report.mode, report.tree_budget)
    gain = f": {Gain(*report.over_plain)} plain decoding" if report.over_plain else ""
    yield Sentence(f"Fastest for {report.objective}: {chosen}{gain}. {report.why_ended.capitalize()}.")
    if report.over_current is not None:
        yield Sentence(f"Against the setting in force: {Gain(*report.over_current)}.")
    yield Sentence(f"{report.measurements} measurements; trying everything would take {report.exhaustive}.")
    if report.applied:
        yield Sentence(f"Applied: {report.applied}.")
    known = [each for each in report.results if each.value is not None]
    title = f"{report.unit} by setting, fitted over blocks"
    rows = [Bar(str(Arm(x.mode, x.tree_budget)), x.value or 0.0, f"{x.value:.1f}") for x in known]
    yield Plot(bars(title, rows), title)
    yield Table(
        ("setting", report.unit, "accept length", "n", "verdict"),
        tuple(
            (
                str(Arm(each.mode, each.tree_budget)),
                "n/a" if each.value is None else f"{each.value:.1f}",
                "n/a" if each.accept_length is None else f"{each.accept_length:.2f}",
                str(each.measurements),
                each.verdict,
            )
            for each in report.results
        ),
    )
    for note in report.notes:
        yield Sentence(note)


def _conditions(conditions: Mapping[str, Any]) -> Iterator[Block]:
    yield Heading("Conditions", 3)
    yield Table(
        ("", ""), tuple((name, "n/a" if value is None else str(value)) for name, value in conditions.items())
    )
    load, cpus = conditions.get("load_average_before"), conditions.get("client_cpus")
    if isinstance(load, float) and isinstance(cpus, int) and load > cpus / 2:
        yield Sentence(
            f"The machine was not idle: load average {load:.1f} on {cpus} CPUs before the measurement."
        )


def to_markdown(blocks: Sequence[Block], plot: Callable[[int, Plot], str | None]) -> str:
    """The page as Markdown; `plot` gives the address of a plot's file, None to leave it out."""
    parts = []
    plots = 0
    for block in blocks:
        if isinstance(block, Heading):
            parts.append(f"{'#' * block.level} {_plain(block.text)}")
        elif isinstance(block, Sentence):
            parts.append(_plain(block.text))
        elif isinstance(block, Plot):
            plots += 1
            address = plot(plots, block)
            if address is not None:
                parts.append(f"![{_plain(block.title)}]({address})")
        else:
            rows = [block.columns, tuple("---" for _ in block.columns), *block.rows]
            parts.append("\n".join("| " + " | ".join(map(_cell, row)) + " |" for row in rows))
    return "\n\n".join(parts) + "\n"


def to_html(blocks: Sequence[Block]) -> str:
    """The page as one HTML file that needs nothing else."""
    title = next((block.text for block in blocks if isinstance(block, Heading)), "")
    parts = []
    for block in blocks:
        if isinstance(block, Heading):
            parts.append(f"<h{block.level}>{escape(block.text)}</h{block.level}>")
        elif isinstance(block, Sentence):
            parts.append(f"<p>{escape(block.text)}</p>")
        elif isinstance(block, Plot):
            parts.append(f"<p>{block.svg}</p>")
        else:
            head = "".join(f"<th>{escape(each)}</th>" for each in block.columns)
            body = "".join(
                "<tr>" + "".join(f"<td>{escape(each)}</td>" for each in row) + "</tr>" for row in block.rows
            )
            parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
    style = (
        "body{font-family:sans-serif;max-width:70em;margin:2em auto;padding:0 1em}"
        "table{border-collapse:collapse;margin:1em 0}td,th{border:1px solid #999;padding:.2em .5em;text-align:left}"
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{style}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _plain(text: str) -> str:
    """Text in which nothing is taken for Markdown or HTML."""
    text = " ".join(text.split()).replace("\\", "\\\\")
    for mark in "`*_[]<>":
        text = text.replace(mark, "\\" + mark)
    return text


def _cell(text: str) -> str:
    return text if text == "---" else _plain(text).replace("|", "\\|")


def _name(row: Mapping[str, Any]) -> str:
    return str(Arm(cast(Mode, row["mode"]), int(row["tree_budget"])))


def _setting(result: LoadResult) -> str:
    budget = f" {result.tree_budget}" if result.tree_budget is not None else ""
    return f"{result.mode or ''}{budget}"


def _load_name(result: LoadResult) -> str:
    load = _users(result.concurrency or 1) if result.rate is None else f"{result.rate:g} requests/s"
    setting = _setting(result)
    return f"{load}{f', {setting}' if setting else ''}, T {result.temperature:g}"


def _users(count: int) -> str:
    return "1 user" if count == 1 else f"{count} users"


def _speed(row: Mapping[str, Any]) -> str:
    gain = f" ({row['speed_up']:.2f}x)" if row.get("speed_up") else ""
    return f"{row['tok_s']:.1f}{gain}"


def seconds(value: float | None) -> str:
    """A time in the unit that suits it."""
    if value is None:
        return "n/a"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def _at(spread: Spread | None, name: str, form: Callable[[float], str] = seconds) -> str:
    return "n/a" if spread is None else form(getattr(spread, name))

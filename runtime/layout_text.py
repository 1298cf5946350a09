"""Plans and presets as lines for a terminal and as JSON; nothing here needs an engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from textwrap import wrap
from typing import Any

from layouts.fit import GIB, Fit
from layouts.forecast import Compared
from layouts.host import Host
from layouts.library import Library
from layouts.plan import LayoutPlan
from layouts.presets import Conditions, Evidence, Preset

WIDTH = 100
NA = "n/a"


def list_lines(library: Library, presets: Sequence[tuple[Preset, bool]]) -> Iterator[str]:
    """One line a preset; those made for this host carry a star."""
    names = max(len(preset.name) for preset, _ in presets)
    for preset, here in presets:
        origin = library.origins["presets", preset.name].words
        records = len(preset.evidence)
        measured = f"{records} record{'s' if records != 1 else ''}" if records else "not measured"
        yield (
            f"{'*' if here else ' '} {preset.name:<{names}}  {preset.engine:<6}  {preset.degrees.label:<8}  "
            f"{measured:<12}  {preset.title}{'' if origin == 'shipped' else f' ({origin})'}"
        )
    yield "* for this host and model"


def show_lines(preset: Preset, origin: str) -> Iterator[str]:
    """Everything a preset says."""
    yield f"{preset.name}: {preset.title} ({origin})"
    yield f"  engine {preset.engine} · degrees {preset.degrees.label} · layout = {preset.field_value}"
    yield f"  model {preset.model or 'any'} · hardware {preset.hardware} · graphs {'on' if preset.graphs else 'off'}"
    said = preset.speculation
    budget = NA if said.tree_budget is None else said.tree_budget
    yield f"  speculation {said.mode or 'as configured'}" + (
        f", tree_budget {budget}" if said.mode == "tree" else ""
    )
    need = preset.requires
    wants = [
        f"{preset.devices or preset.degrees.ranks} devices",
        f"{need.memory_gib:g} GiB each" if need.memory_gib else "",
        need.interconnect or "",
        f"CUDA toolkit {need.toolkit}" if need.toolkit else "",
    ]
    yield f"  requires {', '.join(want for want in wants if want)}"
    for name, value in preset.arguments.items():
        yield f"  argument --{name}" + ("" if value is True else f" {value}")
    for name, variable in preset.environment.items():
        how = " (in front of what is there)" if variable.prepend else ""
        when = "; read at import, needs a new process" if variable.before == "import" else ""
        yield f"  variable {name}={variable.value}{how}: {variable.why}{when}"
    yield from _indented("source", preset.sources)
    yield from _indented("note", preset.notes)
    for record in preset.evidence:
        yield from evidence_lines(record)
    if not preset.evidence:
        yield "  not measured"


def evidence_lines(record: Evidence) -> Iterator[str]:
    said = conditions_words(record.conditions)
    yield f"  measured: {record.figure}" + (f" ({said})" if said else "")
    if record.finding and record.middle is not None:
        yield f"      {record.finding}"
    yield f"      scope: {record.scope.words}"
    when = f", {record.measured_at}" if record.measured_at else ", date n/a"
    yield f"      source: {record.source}{when}"


def conditions_words(said: Conditions) -> str:
    """The conditions of a figure, as far as they are stated."""
    parts = [
        said.layout,
        f"mode {said.mode}" if said.mode else None,
        f"block {said.block_size}" if said.block_size else None,
        f"budget {said.tree_budget}" if said.tree_budget is not None else None,
        f"concurrency {said.concurrency}" if said.concurrency else None,
        None if said.graphs is None else f"graphs {'on' if said.graphs else 'off'}",
        f"accept length {said.accept_length:.2f}" if said.accept_length else None,
        f"T {said.temperature:g}" if said.temperature is not None else None,
        f"prompts {said.prompts}" if said.prompts else None,
    ]
    return ", ".join(part for part in parts if part)


def plan_lines(
    host: Host, model: str, plans: Sequence[LayoutPlan], loads: Sequence[int], context: int
) -> Iterator[str]:
    """The table of all plans, then what refuses each."""
    yield f"host: {host.words}{f' ({host.note})' if host.note else ''}"
    yield f"model: {model} · {context} tokens a sequence · ranked at concurrency {loads[0]}"
    yield "columns 'at N': predicted output tokens/s of N requests together; * = not all fit, the rest wait"
    names = max(len("layout"), *(len(plan.preset.name) for plan in plans))
    labels = max(len("degrees"), *(len(plan.label) for plan in plans))
    yield (
        f"{'layout':<{names}}  {'degrees':<{labels}}  {f'fit at {loads[0]}, a rank':<18}"
        + "".join(f"{f'at {load}':>9}" for load in loads)
        + "  measured here"
    )
    for plan in plans:
        figures = (
            "".join(f"{_total(plan, load):>9}" for load in loads) if plan.possible else "  refused".ljust(9)
        )
        measured = "; ".join(each.record.figure for each in plan.compared if each.predicted is not None)
        yield f"{plan.preset.name:<{names}}  {plan.label:<{labels}}  {fit_words(plan.fit):<18}{figures}" + (
            f"  {measured or '-'}" if plan.possible else ""
        )
    for plan in plans:
        for reason in plan.refused:
            yield from _wrapped(f"{plan.preset.name}: refused: {reason}")
        if plan.shortage:
            yield from _wrapped(f"{plan.preset.name}: at {loads[0]}: {plan.shortage}")
        if plan.possible and plan.no_forecast:
            yield from _wrapped(f"{plan.preset.name}: predicted n/a: {plan.no_forecast}")


def _total(plan: LayoutPlan, load: int) -> str:
    forecast = plan.at(load)
    if forecast is None:
        return NA
    mark = "*" if forecast.running < load else ""
    return (
        f"{forecast.prediction.total_tok_s:.1f}{mark}"
        if forecast.prediction.total_tok_s < 100
        else (f"{forecast.prediction.total_tok_s:.0f}{mark}")
    )


def fit_words(fit: Fit | None) -> str:
    if fit is None:
        return NA
    capacity = NA if fit.capacity is None else f"{fit.capacity / GIB:.1f}"
    return f"{fit.total / GIB:.1f} of {capacity} GiB"


def detail_lines(plan: LayoutPlan) -> Iterator[str]:
    """One plan in full: refusals, every term of the fit, predictions by cause, evidence beside prediction."""
    yield f"{plan.preset.name}: {plan.preset.title} ({plan.origin})"
    yield f"  {plan.label} on {plan.machine}, mode {plan.mode}" + (f"; {plan.split}" if plan.split else "")
    for reason in plan.refused:
        yield from _wrapped(f"  refused: {reason}")
    if plan.shortage:
        yield from _wrapped(f"  does not fit: {plan.shortage}")
    yield from fit_lines(plan.fit)
    if plan.no_forecast:
        yield from _wrapped(f"  predicted n/a: {plan.no_forecast}")
    elif plan.forecasts:
        yield from _forecast_lines(plan)
    for compared in plan.compared:
        yield from compared_lines(compared)
    for record in plan.findings:
        yield from evidence_lines(record)
    if not plan.compared and not plan.findings:
        yield f"  measured: nothing in this scope ({plan.machine}, {plan.preset.engine})"
    if plan.elsewhere:
        scopes = sorted({record.scope.words for record in plan.elsewhere})
        yield from _wrapped(f"  measured elsewhere, no advice for this hardware: {'; '.join(scopes)}")
    for name, variable in plan.preset.environment.items():
        when = "needs a new process" if variable.before == "import" else "set in engine processes only"
        yield f"  {name}={variable.value}: {when}"
    yield from _indented("note", plan.notes)


def fit_lines(fit: Fit | None) -> Iterator[str]:
    if fit is None:
        return
    yield f"  memory of the fullest rank: {fit_words(fit)}, {fit.verdict} ({fit.capacity_words})"
    for term in fit.terms:
        mark = ", assumed" if term.assumed else ""
        yield f"    {term.bytes / GIB:9.3f} GiB  {term.name:<17} {term.how}{mark}"
    if fit.largest_concurrency is not None:
        yield f"    at most {fit.largest_concurrency} sequences of this length fit"


def _forecast_lines(plan: LayoutPlan) -> Iterator[str]:
    if plan.accept_words:
        yield f"  {plan.accept_words}"
    yield from _wrapped(f"  {plan.calibration}")
    yield "  predicted        tok/s of one  tok/s of all  round ms: memory  kernels  links  bubbles  drafter"
    for each in plan.forecasts:
        made = each.prediction
        times = (made.memory_s, made.kernels_s, made.links_s, made.bubbles_s, made.drafter_s)
        cells = " ".join(f"{seconds * 1e3:>8.2f}" for seconds in times)
        wait = f"; {each.running} run, the rest waits for memory" if each.running < each.concurrency else ""
        yield (
            f"    at {each.concurrency:<6} {made.tok_s:>15.1f} {made.total_tok_s:>13.1f} {made.round_s * 1e3:>9.2f}: "
            f"{cells}{wait}"
        )


def compared_lines(compared: Compared) -> Iterator[str]:
    yield from evidence_lines(compared.record)
    if compared.predicted is None:
        yield f"      predicted n/a: {compared.why_not}"
        return
    error = compared.error
    words = NA if error is None else f"{error * 100:+.0f} %"
    note = f"; {compared.why_not}" if compared.why_not else "; this record left out of the calibration"
    yield f"      predicted {compared.predicted:.1f}, error {words}{note}"


def _indented(word: str, lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield from _wrapped(f"  {word}: {line}")


def _wrapped(text: str) -> list[str]:
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    return wrap(text, WIDTH, subsequent_indent=indent, drop_whitespace=True, break_long_words=False) or [""]


def preset_json(library: Library, preset: Preset, here: bool | None) -> dict[str, Any]:
    """A preset with its label and origin; `here` None: whether it is for this host was not asked."""
    found = preset.model_dump(mode="json", exclude_none=True)
    found |= {"label": preset.degrees.label, "origin": library.origins["presets", preset.name].words}
    return found if here is None else {**found, "this_host": here}


def plan_json(plan: LayoutPlan) -> dict[str, Any]:
    """A plan with every term; bytes, seconds, tokens per second."""
    fit = plan.fit
    return {
        "name": plan.preset.name,
        "label": plan.label,
        "origin": plan.origin,
        "engine": plan.preset.engine,
        "machine": plan.machine,
        "mode": plan.mode,
        "this_host": plan.here,
        "possible": plan.possible,
        "refused": list(plan.refused),
        "shortage": plan.shortage or None,
        "split": plan.split or None,
        "fit": None
        if fit is None
        else {**fit.model_dump(mode="json"), "total": fit.total, "verdict": fit.verdict},
        "predicted": [
            {
                **asdict(each.prediction),
                "concurrency": each.concurrency,
                "running": each.running,
                "tok_s": each.prediction.tok_s,
                "total_tok_s": each.prediction.total_tok_s,
                "round_s": each.prediction.round_s,
            }
            for each in plan.forecasts
        ],
        "no_prediction": plan.no_forecast or None,
        "calibration": plan.calibration or None,
        "accept_length": plan.accept_words or None,
        "measured": [
            {
                **each.record.model_dump(mode="json", exclude_none=True),
                "predicted": each.predicted,
                "error": each.error,
                "note": each.why_not or None,
            }
            for each in plan.compared
        ],
        "findings": [each.model_dump(mode="json", exclude_none=True) for each in plan.findings],
        "elsewhere": sorted({each.scope.words for each in plan.elsewhere}),
        "needs_new_process": [
            name for name, variable in plan.preset.environment.items() if variable.before == "import"
        ],
        "notes": list(plan.notes),
    }

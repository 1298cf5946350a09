"""What the Layouts screen writes: ranking, memory, evidence beside prediction, each as a Text."""

from __future__ import annotations

from dataclasses import dataclass

from rich.text import Text

from console.formats import NA, bar, clean_line, rate
from layouts.evidence import Known, known_evidence
from layouts.fit import GIB, Term
from layouts.forecast import Compared
from layouts.host import Device, Host, cpu_name, host_of, shape_of
from layouts.library import Library, load_library
from layouts.plan import LayoutPlan, Question, is_here, plan_all
from layouts.presets import Conditions, Evidence, Scope
from layouts.shapes import ModelShape
from layouts.values import LayoutError, Mode

BAR_LEAST = 6
CONTEXT = 1024


@dataclass(frozen=True)
class Asked:
    """Everything a ranking depends on; another one is worked out when this differs."""

    model: str
    drafter: str | None
    mode: Mode
    tree_budget: int | None
    threads: int | None
    gpus: tuple[tuple[str, int | None], ...]
    memory: int | None
    accept_length: float | None
    concurrency: int
    context: int
    every: bool
    """Also the layouts for other hardware."""
    layout: str
    """The one in force."""
    plain_tok_s: float | None
    """Plain decoding of one request, as the runtime measured it in this layout."""
    attached: bool
    """The runtime is elsewhere: its files and its CPU's name cannot be read here."""


@dataclass(frozen=True)
class Ranking:
    """The answer to one `Asked`."""

    asked: Asked
    host: Host
    plans: tuple[LayoutPlan, ...]
    model_words: str
    problems: tuple[str, ...] = ()

    def index_of(self, name: str) -> int:
        """Place of the layout `name`, or 0."""
        return next((i for i, plan in enumerate(self.plans) if plan.preset.name == name), 0)


def make_ranking(asked: Asked) -> Ranking:
    """Reads presets and evidence and plans them; takes up to a second, so it belongs in a thread."""
    library = load_library()
    known = known_evidence(library)
    host = host_of(
        library,
        [Device(name=name, memory=memory) for name, memory in asked.gpus],
        cpu=None if asked.attached else cpu_name(),
        threads=asked.threads,
        memory=asked.memory,
    )
    shape, words = _shape(library, asked)
    question = Question(
        model=shape,
        concurrency=(asked.concurrency,),
        context=asked.context,
        default_mode=asked.mode,
        tree_budget=asked.tree_budget,
        accept_length=asked.accept_length,
        accept_words="as measured here since the last flip",
    )
    known = Known((*known.records, *_baseline(library, host, shape, asked)), known.problem)
    chosen = [
        preset
        for preset in library.presets.values()
        if asked.every
        or is_here(preset, host, shape)
        or (preset.hardware == "host" and preset.engine == "native")
    ]
    plans = plan_all(library, host, question, known, chosen)
    return Ranking(asked, host, plans, words, _problems(library, known))


def _baseline(library: Library, host: Host, shape: ModelShape | None, asked: Asked) -> tuple[Evidence, ...]:
    """The runtime's own baseline as a record of this host's scope."""
    now = next((p for p in library.presets.values() if p.field_value == asked.layout), None)
    if now is None or shape is None or asked.plain_tok_s is None or asked.attached:
        return ()
    on_cpu = host.hardware.device == "cpu"
    scope = Scope(
        hardware=host.hardware.class_name,
        devices=1 if on_cpu else now.degrees.ranks,
        interconnect=host.hardware.interconnect,
        engine=now.engine,
    )
    conditions = Conditions(model=shape.name, layout=now.degrees.label, mode="off", concurrency=1)
    source = "baseline measured by this runtime"
    return (
        Evidence(unit="tok/s", value=asked.plain_tok_s, scope=scope, conditions=conditions, source=source),
    )


def _problems(library: Library, known: Known) -> tuple[str, ...]:
    return library.problems if known.problem is None else (*library.problems, known.problem)


def _shape(library: Library, asked: Asked) -> tuple[ModelShape | None, str]:
    if asked.attached and asked.model not in library.models:
        return None, f"dimensions of {asked.model} are on the server"
    drafter = None if asked.attached and asked.drafter != "none" else asked.drafter
    try:
        shape = shape_of(library, asked.model, drafter)
    except LayoutError as problem:
        return None, str(problem)
    return shape, shape.title


def ranking_text(ranking: Ranking, selected: int, first: int, rows: int, width: int, now: str) -> Text:
    """Rows `first ..` of the ranking with a bar each; `now` is the layout in force."""
    plans = ranking.plans
    load = ranking.asked.concurrency
    best = _best_of_each_model(plans, load)
    names = max((len(plan.preset.name) for plan in plans), default=0)
    labels = max((len(plan.label) for plan in plans), default=0)
    text = Text()
    for index in range(first, min(first + rows, len(plans))):
        plan = plans[index]
        mine = plan.preset.field_value == now
        line = Text(f"{'>' if index == selected else ' '}{'*' if mine else ' '}")
        line.append(f"{plan.preset.name:<{names}}  {plan.label:<{labels}}  ")
        if plan.refused:
            line.append("refused: ", "bad")
            line.append(clean_line(plan.refused[0]))
        else:
            _append_bar(line, plan, load, best.get(plan.preset.model, 0.0), width - len(line.plain))
        line.truncate(max(width, 1), overflow="ellipsis")
        if index == selected:
            line.stylize("bold")
        text.append_text(line)
        text.append("\n" if index + 1 < min(first + rows, len(plans)) else "")
    return text if plans else Text("no layout is for this host; o shows those for others", style="dim")


def _best_of_each_model(plans: tuple[LayoutPlan, ...], load: int) -> dict[str | None, float]:
    """The highest predicted tok/s by model: bars compare layouts, not models."""
    best: dict[str | None, float] = {}
    for plan in plans:
        forecast = plan.at(load)
        if forecast is not None:
            figure = forecast.prediction.total_tok_s
            best[plan.preset.model] = max(best.get(plan.preset.model, 0.0), figure)
    return best


def _append_bar(line: Text, plan: LayoutPlan, load: int, best: float, room: int) -> None:
    forecast = plan.at(load)
    figure = f"{rate(forecast.prediction.total_tok_s) if forecast else NA:>7} "
    fit = plan.fit
    memory = f" {NA if fit is None else f'{fit.total / GIB:.1f} GiB'}"
    measured = sum(1 for each in plan.compared if each.predicted is not None)
    marks = f"{memory:<11}{f'measured {measured}' if measured else 'predicted'}"
    cells = max(room - len(figure) - len(marks) - 1, BAR_LEAST)
    share = forecast.prediction.total_tok_s / best if forecast and best else None
    line.append(bar(share, cells), "share")
    line.append(figure)
    line.append(marks, "" if measured else "dim")


def memory_text(plan: LayoutPlan, width: int) -> Text:
    """The fit as bars: the whole against what there is, then each term against the whole."""
    fit = plan.fit
    if fit is None:
        return Text("n/a: " + (plan.no_forecast or "the layout is refused"), style="dim")
    cells = max(min(width // 3, 30), BAR_LEAST)
    text = Text("total             ")
    share = fit.total / fit.capacity if fit.capacity else None
    style = {"fits": "good", "does not fit": "bad"}.get(fit.verdict, "fair")
    capacity = NA if fit.capacity is None else f"{fit.capacity / GIB:.1f}"
    text.append(bar(share, cells), "share")
    text.append(f" {fit.total / GIB:.2f} of {capacity} GiB  ")
    text.append(fit.verdict, style)
    if fit.largest_concurrency is not None:
        text.append(f", at most {fit.largest_concurrency} sequences")
    for term in fit.terms:
        text.append("\n")
        text.append_text(_term_text(term, fit.total, cells))
    return text


def _term_text(term: Term, total: float, cells: int) -> Text:
    text = Text(f"{term.name:<18}")
    text.append(bar(term.bytes / total if total else None, cells), "stage")
    text.append(f" {term.bytes / GIB:8.3f} GiB  ")
    text.append(clean_line(term.how + (", assumed" if term.assumed else "")), "dim")
    return text


def prediction_text(plan: LayoutPlan, concurrency: int) -> Text:
    """One round by cause, and on what the figures rest."""
    text = Text()
    for reason in plan.refused:
        text.append("refused: ", "bad")
        text.append(clean_line(reason) + "\n")
    if plan.shortage:
        text.append(f"does not fit: {plan.shortage}\n", "bad")
    if plan.split:
        text.append(f"{plan.split}\n")
    forecast = plan.at(concurrency)
    if forecast is None:
        text.append(f"predicted n/a: {plan.no_forecast}", "dim")
        return text
    made = forecast.prediction
    text.append(f"predicted {rate(made.total_tok_s)} tok/s of all, {rate(made.tok_s)} of one", "bold")
    if forecast.running < concurrency:
        text.append(f"; {forecast.running} run, the rest waits for memory", "fair")
    text.append(f"\nround {made.round_s * 1e3:.1f} ms: memory {made.memory_s * 1e3:.1f}")
    for word, seconds in (
        ("kernels", made.kernels_s),
        ("links", made.links_s),
        ("bubbles", made.bubbles_s),
        ("drafter", made.drafter_s),
    ):
        text.append(f" · {word} {seconds * 1e3:.1f}")
    for words in (plan.accept_words, plan.calibration):
        if words:
            text.append(f"\n{clean_line(words)}", "dim")
    return text


def evidence_text(plan: LayoutPlan) -> Text:
    """What was measured in this scope beside its prediction; what was measured elsewhere, and that it is no advice."""
    text = Text()
    for compared in plan.compared:
        text.append_text(_compared_text(compared))
    for record in plan.findings:
        text.append(f"{clean_line(record.figure)}\n", "bold")
        text.append_text(_scope_text(record))
    if not plan.compared and not plan.findings:
        text.append(f"nothing in this scope: {plan.machine}, {plan.preset.engine}\n", "dim")
    scopes = sorted({record.scope.words for record in plan.elsewhere})
    for scope in scopes:
        text.append(f"measured elsewhere, no advice here: {clean_line(scope)}\n", "dim")
    for note in plan.notes:
        text.append(f"note: {clean_line(note)}\n", "dim")
    for name, variable in plan.preset.environment.items():
        when = "needs a new process" if variable.before == "import" else "in engine processes only"
        text.append(f"{name}={clean_line(variable.value)}: {when}\n", "dim")
    text.rstrip()
    return text


def _compared_text(compared: Compared) -> Text:
    record = compared.record
    text = Text()
    text.append(f"measured {clean_line(record.figure)}", "bold")
    if record.conditions.mode:
        text.append(f", mode {record.conditions.mode}")
    if record.conditions.concurrency:
        text.append(f", at {record.conditions.concurrency}")
    if compared.predicted is not None:
        error = NA if compared.error is None else f"{compared.error * 100:+.0f} %"
        text.append(f"; predicted {rate(compared.predicted)}, error {error}")
    if compared.why_not:
        text.append(f" ({compared.why_not})", "dim")
    text.append("\n")
    text.append_text(_scope_text(record))
    return text


def _scope_text(record: Evidence) -> Text:
    return Text(f"  {clean_line(record.scope.words)}; {clean_line(record.source)}\n", style="dim")

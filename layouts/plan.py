"""The plan of a layout on a host: what refuses it, what it needs, and what is predicted beside what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from layouts.calibrate import best_group, calibrate
from layouts.checks import block_of, label_of, refusals, split_words, tree_refusal
from layouts.cost import rates
from layouts.evidence import Known
from layouts.fit import GIB, Fit, Load, fit
from layouts.forecast import CHAIN_BLOCK, Compared, Forecast, Forecaster
from layouts.host import Host
from layouts.library import Library
from layouts.presets import Evidence, Preset, Scope
from layouts.shapes import Format, Hardware, ModelShape
from layouts.values import HOST, Frozen, Mode


class Question(Frozen):
    """What is asked of every preset."""

    model: ModelShape | None = None
    """Of presets that name none; None = dimensions not known."""
    concurrency: tuple[int, ...] = (1, 8, 64, 256)
    context: int = 1024
    """Mean tokens of a sequence, and what must fit for each."""
    mode: Mode | None = None
    """None: as the preset says."""
    default_mode: Mode = "off"
    """Of presets that say none."""
    tree_budget: int | None = None
    accept_length: float | None = None
    accept_words: str = "as given"
    dtype: Format = "bfloat16"
    kv_format: Format | None = None
    """None: bfloat16, or what the native engine computes in."""


@dataclass(frozen=True)
class LayoutPlan:
    """Everything there is to say about one preset on one host."""

    preset: Preset
    origin: str
    label: str
    here: bool
    """Made for this host."""
    machine: str
    """Devices and interconnect it is planned for."""
    mode: Mode
    refused: tuple[str, ...] = ()
    fit: Fit | None = None
    shortage: str = ""
    """Why not all asked sequences fit at once, with the numbers, if so."""
    forecasts: tuple[Forecast, ...] = ()
    no_forecast: str = ""
    """Why nothing is predicted, if so."""
    calibration: str = ""
    accept_words: str = ""
    compared: tuple[Compared, ...] = ()
    """Measured with these degrees in this scope."""
    findings: tuple[Evidence, ...] = ()
    """Of this scope, without a figure to compare."""
    elsewhere: tuple[Evidence, ...] = ()
    """Of other scopes: no advice here."""
    split: str = ""
    notes: tuple[str, ...] = field(default=())

    def at(self, concurrency: int) -> Forecast | None:
        return next((each for each in self.forecasts if each.concurrency == concurrency), None)

    @property
    def possible(self) -> bool:
        return not self.refused


def plan_all(
    library: Library,
    host: Host,
    question: Question,
    known: Known,
    presets: Sequence[Preset] | None = None,
    rank_by: int | None = None,
) -> tuple[LayoutPlan, ...]:
    """Plans of `presets` (None = all), ranked: this host's first, then by model, possible ones first, then predicted
    tok/s in total.

    `rank_by` is the load they are ranked at; None = the first one asked.
    """
    chosen = library.presets.values() if presets is None else presets
    plans = [plan_layout(library, host, question, known, preset) for preset in chosen]
    return ranked(plans, question.concurrency[0] if rank_by is None else rank_by)


def ranked(plans: Sequence[LayoutPlan], concurrency: int) -> tuple[LayoutPlan, ...]:
    def place(plan: LayoutPlan) -> tuple[bool, str, bool, float, str]:
        forecast = plan.at(concurrency)
        return (
            not plan.here,
            plan.preset.model or "",
            not plan.possible,
            -(forecast.prediction.total_tok_s if forecast else 0.0),
            plan.preset.name,
        )

    return tuple(sorted(plans, key=place))


def plan_layout(library: Library, host: Host, question: Question, known: Known, preset: Preset) -> LayoutPlan:
    """The plan of one preset: on the host where it is for any, else on the hardware it names."""
    hardware = host.hardware if preset.hardware == HOST else library.device(preset.hardware)
    shape = library.model(preset.model) if preset.model else question.model
    here = is_here(preset, host, question.model)
    devices = preset.devices or preset.degrees.ranks
    available = host.devices if preset.hardware == HOST else devices
    asked = _Asked.of(preset, question, shape, hardware)
    scope = Scope(
        hardware=hardware.class_name,
        devices=1 if hardware.device == "cpu" else devices,
        interconnect=hardware.interconnect,
        engine=preset.engine,
    )
    model = shape.name if shape is not None else None
    found = known.at(scope, model) if model is not None else ()
    refused = list(_refusals(preset, shape, asked, hardware, available))
    plan = LayoutPlan(
        preset=preset,
        origin=library.origins["presets", preset.name].words,
        label=label_of(shape, preset.degrees, preset.engine),
        here=here,
        machine=f"{devices} x {hardware.class_name}, {hardware.interconnect}"
        if hardware.device == "gpu"
        else hardware.class_name,
        mode=asked.load.mode,
        elsewhere=known.elsewhere(scope, model),
        notes=(*preset.notes, *(shape.notes if shape else ())),
    )
    if shape is None:
        return replace(plan, refused=tuple(refused), no_forecast="dimensions of the model are not known")
    plan = replace(plan, split=split_words(shape, preset.degrees, preset.engine))
    if refused:
        return replace(plan, refused=tuple(refused), no_forecast="it is refused")
    memory = _fit(shape, preset, asked, hardware)
    if memory.shortage and not memory.largest_concurrency:
        return replace(plan, fit=memory, refused=(memory.shortage,), no_forecast="it is refused")
    plan = replace(plan, fit=memory, shortage=memory.shortage or "")
    return _with_forecasts(plan, shape, hardware, question, asked, scope, found, memory)


@dataclass(frozen=True)
class _Asked:
    """The question as one preset understands it."""

    load: Load
    accept_length: float | None
    accept_words: str

    @classmethod
    def of(cls, preset: Preset, question: Question, shape: ModelShape | None, hardware: Hardware) -> _Asked:
        wishes = preset.speculation
        mode = question.mode or wishes.mode or question.default_mode
        if question.mode is None and wishes.mode is None and (shape is None or shape.drafter is None):
            mode = "off"
        if preset.degrees.pp > 1 and preset.engine == "sglang" and question.mode is None:
            mode = "off"
        block = block_of(shape.drafter if shape else None, wishes.block_size) or CHAIN_BLOCK
        budget = wishes.tree_budget if question.tree_budget is None else question.tree_budget
        dtype: Format = "float32" if hardware.device == "cpu" else question.dtype
        load = Load(
            concurrency=max(question.concurrency[0], 1),
            context=question.context,
            mode=mode,
            block_size=block if mode != "off" else 1,
            tree_budget=(block - 1 if budget is None else budget) if mode == "tree" else 0,
            dtype=dtype,
            kv_format=question.kv_format or (dtype if preset.engine == "native" else "bfloat16"),
            graphs=preset.graphs,
        )
        return cls(load, 1.0 if mode == "off" else question.accept_length, question.accept_words)


def is_here(preset: Preset, host: Host, model: ModelShape | None) -> bool:
    """Whether a preset is for this host and, where that is known, for the model in question."""
    if preset.model is not None and model is not None and model.name != preset.model:
        return False
    if preset.hardware == HOST:
        return preset.degrees.ranks <= host.devices and (
            preset.engine == "native" or host.hardware.device == "gpu"
        )
    return preset.hardware == host.hardware.name and (preset.devices or preset.degrees.ranks) <= host.devices


def _refusals(
    preset: Preset, shape: ModelShape | None, asked: _Asked, hardware: Hardware, available: int
) -> tuple[str, ...]:
    load = asked.load
    if hardware.device == "cpu" and preset.engine == "sglang":
        return ("SGLang layouts are for GPUs, and this host has none",)
    word = "GPU" if hardware.device == "gpu" else "rank"
    found = list(refusals(shape, preset.degrees, preset.engine, load.mode, available, word))
    if load.mode == "tree" and preset.engine == "sglang":
        narrow = tree_refusal(load.tree_budget, load.block_size)
        found += [narrow] if narrow else []
    if load.mode != "off" and shape is not None and preset.engine == "native" and shape.drafter is None:
        found.append(f"mode = {load.mode}: no drafter is known for {shape.title}; use --mode off")
    need = preset.requires
    if need.memory_gib and hardware.memory_gib and hardware.memory_gib < need.memory_gib:
        found.append(f"needs {need.memory_gib:g} GiB a device, {hardware.title} has {hardware.memory_gib:g}")
    if need.interconnect and need.interconnect != hardware.interconnect:
        found.append(f"is made for {need.interconnect}, this host has {hardware.interconnect}")
    return tuple(found)


def _fit(shape: ModelShape, preset: Preset, asked: _Asked, hardware: Hardware) -> Fit:
    ranks = preset.degrees.ranks
    part = ranks if hardware.shared else 1
    capacity = hardware.memory_gib * GIB / part if hardware.memory_gib else None
    words = hardware.title if part == 1 else f"{hardware.title}, shared by {ranks} ranks"
    return fit(shape, preset.degrees, preset.engine, asked.load, capacity, words, hardware.reserve_gib * GIB)


def _with_forecasts(
    plan: LayoutPlan,
    shape: ModelShape,
    hardware: Hardware,
    question: Question,
    asked: _Asked,
    scope: Scope,
    found: tuple[Evidence, ...],
    memory: Fit,
) -> LayoutPlan:
    preset = plan.preset
    mine = tuple(record for record in found if _is_of(record, preset, asked.load.mode))
    plan = replace(plan, findings=tuple(record for record in mine if record.middle is None))
    at = rates(hardware, preset.degrees, preset.engine)
    if isinstance(at, str):
        compared = tuple(Compared(record, None, at) for record in mine if record.middle is not None)
        return replace(plan, no_forecast=at, compared=compared)
    accept, words = _accept_length(asked, mine)
    maker = Forecaster(shape, preset, hardware, asked.load, memory.largest_concurrency)
    chosen_scope, cases = best_group([case for record in found if (case := maker.case(record))])
    if chosen_scope is not None and not chosen_scope.same_place(scope):
        raise AssertionError("evidence of another scope")
    calibration = calibrate(chosen_scope, cases, at)
    compared = tuple(
        maker.compare(record, accept, calibration, at) for record in mine if record.middle is not None
    )
    plan = replace(plan, calibration=calibration.words, compared=compared, accept_words=words)
    corrected = calibration.apply(at)
    if accept is None:
        maker, accept = replace(maker, load=plain(asked.load)), 1.0
        words = f"predicted for plain decoding: the accept length in mode {asked.load.mode} is not known here"
        plan = replace(plan, accept_words=words)
    forecasts = tuple(maker.forecast(each, accept, corrected) for each in question.concurrency)
    return replace(plan, forecasts=forecasts)


def _is_of(record: Evidence, preset: Preset, mode: Mode) -> bool:
    """Whether a record is of these degrees and of this mode or plain decoding, its yardstick."""
    said = record.conditions
    return said.layout in (None, preset.degrees.label) and said.mode in (None, "off", mode)


def plain(load: Load) -> Load:
    """`load` without speculation."""
    return load.model_copy(update={"mode": "off", "block_size": 1, "tree_budget": 0})


def _accept_length(asked: _Asked, mine: tuple[Evidence, ...]) -> tuple[float | None, str]:
    """The accept length in force and where it comes from: as given, else measured with this layout in this scope."""
    mode = asked.load.mode
    if mode == "off":
        return 1.0, ""
    if asked.accept_length is not None:
        return asked.accept_length, f"accept length {asked.accept_length:g}, {asked.accept_words}"
    for record in mine:
        if record.unit == "tokens/round" and record.conditions.mode == mode and record.middle:
            return record.middle, f"accept length {record.middle:g}: {record.figure} measured in this scope"
    budgeted = [
        record.conditions.accept_length
        for record in mine
        if record.conditions.mode == mode and record.conditions.accept_length
    ]
    if budgeted:
        return budgeted[-1], f"accept length {budgeted[-1]:.2f}, measured in this scope"
    return None, ""

"""Predictions for one preset: of the loads asked for, and of the conditions under which something was measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

from layouts.calibrate import Calibration, Case
from layouts.cost import Prediction, Rates, busy_ranks, predict
from layouts.fit import Load
from layouts.presets import Degrees, Evidence, Preset
from layouts.shapes import Hardware, ModelShape

SWEEP = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Loads a peak is looked for in."""
CHAIN_BLOCK = 8
"""Draft block where neither the preset nor a drafter's dimensions say one."""


@dataclass(frozen=True)
class Forecast:
    """One predicted round at an asked load."""

    concurrency: int
    """Asked for."""
    running: int
    """As many as memory holds; the rest wait."""
    prediction: Prediction


@dataclass(frozen=True)
class Compared:
    """A measured figure of this layout beside the prediction of its conditions."""

    record: Evidence
    predicted: float | None
    """With the record itself left out of the calibration; None where its conditions do not say enough."""
    why_not: str = ""

    @property
    def error(self) -> float | None:
        """Predicted over measured, minus 1; 0 inside a measured range."""
        if self.predicted is None or self.record.middle is None:
            return None
        low, high = self.record.low or self.record.middle, self.record.high or self.record.middle
        if low <= self.predicted <= high:
            return 0.0
        return self.predicted / (low if self.predicted < low else high) - 1


@dataclass(frozen=True)
class Forecaster:
    """Makes predictions for one preset: of asked loads, and of the conditions of records."""

    shape: ModelShape
    preset: Preset
    hardware: Hardware
    load: Load
    largest: int | None
    """Most sequences that fit."""

    def forecast(self, concurrency: int, accept_length: float, at: Rates) -> Forecast:
        running = concurrency if self.largest is None else min(concurrency, max(self.largest, 1))
        load = self.load.model_copy(update={"concurrency": running})
        made = predict(self.shape, self.preset.degrees, self.preset.engine, load, accept_length, at)
        return Forecast(concurrency, running, made)

    def case(self, record: Evidence) -> Case | None:
        """`record` as something to calibrate by; None where its conditions do not say enough."""
        said = record.conditions
        degrees = Degrees.parse(said.layout) if said.layout else None
        if degrees is None or said.concurrency is None or record.peak or record.middle is None:
            return None
        if record.unit not in ("tok/s", "tok/s total") or said.mode is None:
            return None
        if said.mode != "off" and said.accept_length is None:
            return None
        at = self._load_of(record)
        accept = 1.0 if said.mode == "off" else said.accept_length
        assert accept is not None

        def made(given: Rates) -> Prediction:
            return predict(
                self.shape, degrees, self.preset.engine, at, accept, _for_degrees(given, degrees, self)
            )

        return Case(record, made)

    def _load_of(self, record: Evidence) -> Load:
        said = record.conditions
        mode = said.mode or "off"
        block = said.block_size or (self.shape.drafter.block_size if self.shape.drafter else CHAIN_BLOCK)
        return self.load.model_copy(
            update={
                "concurrency": said.concurrency or 1,
                "context": said.context or self.load.context,
                "mode": mode,
                "block_size": block if mode != "off" else 1,
                "tree_budget": (said.tree_budget or 0) if mode == "tree" else 0,
                "graphs": self.preset.graphs if said.graphs is None else said.graphs,
            }
        )

    def compare(
        self, record: Evidence, accept: float | None, calibration: Calibration, at: Rates
    ) -> Compared:
        if record.unit not in ("tok/s", "tok/s total"):
            return Compared(record, None, "an input of the model, not predicted by it")
        corrected = calibration.without(record, at).apply(at)
        case = self.case(record)
        if case is not None:
            made = case.predict(corrected)
            return Compared(record, made.total_tok_s if record.unit == "tok/s total" else made.tok_s)
        if record.peak and (record.conditions.mode == "off" or accept is not None):
            share = 1.0 if record.conditions.mode == "off" else accept
            assert share is not None
            load = self._load_of(record)
            maker = Forecaster(self.shape, self.preset, self.hardware, load, self.largest)
            best = max(maker.forecast(each, share, corrected).prediction.total_tok_s for each in SWEEP)
            return Compared(record, best, "the measured load is not stated; the best of 1 to 1024 that fit")
        return Compared(record, None, "its conditions do not say enough")


def _for_degrees(given: Rates, degrees: Degrees, maker: Forecaster) -> Rates:
    """`given`, made for the preset's degrees, for those of a record: ranks on one CPU share it."""
    if not maker.hardware.shared:
        return given
    engine = maker.preset.engine
    mine = maker.preset.degrees
    memory = given.memory * busy_ranks(mine, engine) / busy_ranks(degrees, engine)
    return replace(given, memory=memory, arithmetic=given.arithmetic * mine.ranks / degrees.ranks)

"""Presets and evidence: one layout with its degrees, engine arguments and requirements, and what was measured of it."""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from layouts.values import HOST, Count, Engine, Frozen, Line, Mode, Name, Positive


class Degrees(Frozen):
    """Parallel degrees. Under SGLang experts are spread over the tensor-parallel ranks, so ep divides tp there."""

    tp: Count = 1
    ep: Count = 1
    pp: Count = 1
    dp: Count = 1

    @property
    def ranks(self) -> int:
        return max(self.tp, self.ep) * self.pp * self.dp

    @property
    def label(self) -> str:
        """As in TP8+EP8; "single" for one rank."""
        parts = [f"{name.upper()}{degree}" for name, degree in self if degree > 1]
        return "+".join(parts) or "single"

    @classmethod
    def parse(cls, label: str) -> Degrees | None:
        """The degrees of such a label, or None where it is none."""
        if label.lower() == "single":
            return cls()
        parts = [re.fullmatch(r"(tp|ep|pp|dp)([1-9]\d{0,3})", part) for part in label.lower().split("+")]
        found = {part[1]: int(part[2]) for part in parts if part is not None}
        return cls(**found) if len(found) == len(parts) else None


class Speculation(Frozen):
    """How a preset speculates; the fields that are None follow the configuration."""

    mode: Mode | None = None
    block_size: Count | None = None
    tree_budget: int | None = Field(default=None, ge=0)


class Requires(Frozen):
    """What a preset needs beside its devices."""

    memory_gib: Positive | None = None
    """Of each device."""
    interconnect: Line | None = None
    toolkit: Line | None = None
    """CUDA toolkit, as in ">= 12.9"."""


class Variable(Frozen):
    """An environment variable of the engine's processes; never set in this one."""

    value: str
    before: Literal["import", "start"] = "start"
    """"import": it is read when a library is imported, so a process that has done that needs replacing."""
    prepend: bool = False
    """Put in front of what the variable holds, as for PATH."""
    why: Line


class Scope(Frozen):
    """What evidence holds for. Evidence of one scope is never used for another."""

    hardware: Line
    devices: Count
    interconnect: Line
    engine: Engine
    versions: dict[str, Line] = Field(default_factory=dict)

    @property
    def words(self) -> str:
        versions = [f"{name} {version}" for name, version in sorted(self.versions.items())]
        return ", ".join([f"{self.devices} x {self.hardware}", self.interconnect, self.engine, *versions])

    def same_place(self, other: Scope) -> bool:
        """Whether both are of the same class of machine and engine, whatever the versions."""
        mine = (self.hardware, self.devices, self.interconnect, self.engine)
        return mine == (other.hardware, other.devices, other.interconnect, other.engine)


class Conditions(Frozen):
    """How a figure was measured; None = not stated."""

    model: Name | None = None
    layout: Line | None = None
    """Label of the degrees, as in TP8+EP8."""
    mode: Mode | None = None
    block_size: int | None = None
    tree_budget: int | None = None
    accept_length: Positive | None = None
    concurrency: Count | None = None
    context: Count | None = None
    """Mean tokens in a sequence."""
    graphs: bool | None = None
    prompts: Line | None = None
    temperature: float | None = None


UNITS = ("tok/s", "tok/s total", "tokens/round", "s")


class Evidence(Frozen):
    """One measured figure, or one finding without a figure, with the scope it holds for."""

    unit: Literal["tok/s", "tok/s total", "tokens/round", "s"] | None = None
    """tok/s: of one request; tok/s total: over all requests; tokens/round: accept length, bonus token included."""
    value: Positive | None = None
    low: Positive | None = None
    high: Positive | None = None
    """A range instead of one value."""
    approximate: bool = False
    peak: bool = False
    """The best over a sweep of loads, whose place is not stated."""
    finding: Line | None = None
    scope: Scope
    conditions: Conditions = Conditions()
    measured_at: Line | None = None
    where: Line | None = None
    source: Line

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        ranged = self.low is not None and self.high is not None
        if (self.low is None) != (self.high is None):
            raise ValueError("low and high go together")
        if ranged and self.value is not None:
            raise ValueError("give value, or low and high, not both")
        if ranged and self.low > self.high:  # type: ignore[operator]
            raise ValueError(f"low = {self.low} is above high = {self.high}")
        if not ranged and self.value is None and self.finding is None:
            raise ValueError("needs value, or low and high, or a finding")
        if (ranged or self.value is not None) and self.unit is None:
            raise ValueError(f"unit is missing; one of {', '.join(UNITS)}")
        return self

    @property
    def middle(self) -> float | None:
        """The figure, or the middle of its range."""
        if self.low is not None and self.high is not None:
            return (self.low + self.high) / 2
        return self.value

    @property
    def figure(self) -> str:
        """As in "~1291 tok/s total, peak"; a finding without a figure is its words."""
        if self.middle is None:
            return self.finding or ""
        ends = (self.value,) if self.low is None else (self.low, self.high)
        number = "-".join(f"{round(end, 2):g}" for end in ends if end is not None)
        return f"{'~' if self.approximate else ''}{number} {self.unit}{', peak' if self.peak else ''}"


class Preset(Frozen):
    """One layout: degrees over named hardware, with engine arguments and what was measured."""

    name: Name
    title: Line
    engine: Engine
    layout: Name | None = None
    """Value of the configuration field `layout` that selects it; None = the preset's name."""
    model: Name | None = None
    """None: any model."""
    hardware: Name = HOST
    devices: Count | None = None
    """Devices the scope names; None = as many as ranks."""
    degrees: Degrees = Degrees()
    speculation: Speculation = Speculation()
    graphs: bool = True
    requires: Requires = Requires()
    arguments: dict[str, bool | int | float | Line] = Field(default_factory=dict)
    """Engine arguments beyond model, degrees and speculation, named as on SGLang's command line."""
    environment: dict[str, Variable] = Field(default_factory=dict)
    sources: tuple[Line, ...] = ()
    notes: tuple[Line, ...] = ()
    evidence: tuple[Evidence, ...] = ()

    @property
    def field_value(self) -> str:
        return self.layout or self.name

    @model_validator(mode="before")
    @classmethod
    def _scope_once(cls, values: Any) -> Any:
        """`[scope]` of the file stands for every record that has none of its own."""
        if isinstance(values, dict) and "scope" in values:
            values = dict(values)
            scope = values.pop("scope")
            records = values.get("evidence", ())
            if isinstance(records, (list, tuple)):
                values["evidence"] = [
                    {"scope": scope, **record} if isinstance(record, dict) else record for record in records
                ]
        return values

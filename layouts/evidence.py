"""Measured figures: those of presets, and those this user's benches and snapshots added, each with its scope.

A record is only ever compared with, and only ever corrects, what has the same scope.
"""

from __future__ import annotations

import os
import time
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from layouts.library import MAX_BYTES, Library, explained
from layouts.presets import Conditions, Degrees, Evidence, Scope
from layouts.user_files import replace_text, user_home
from layouts.values import Frozen, LayoutError, model_name

LOCK_S = 10.0


class EvidenceFile(Frozen):
    """What the user's file holds."""

    evidence: tuple[Evidence, ...] = Field(default=())


def evidence_file(env: Mapping[str, str] = os.environ) -> Path:
    """Where records of this user stand: `ddtree/evidence.toml` in the XDG data folder."""
    return user_home("data", env) / "evidence.toml"


def read_evidence(path: Path) -> tuple[Evidence, ...]:
    """The records of `path`, which may be absent; raises LayoutError with file, key, value and what is allowed."""
    try:
        if path.stat().st_size > 16 * MAX_BYTES:
            raise LayoutError(f"{path}: more than {16 * MAX_BYTES} bytes; move it away")
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise LayoutError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise LayoutError(f"{path}: not TOML in UTF-8: {error}") from None
    try:
        return EvidenceFile.model_validate(values).evidence
    except ValidationError as error:
        raise LayoutError(f"{path}: {explained(error, EvidenceFile)}") from None


def evidence_text(records: Iterable[Evidence]) -> str:
    """The text of a file with `records`; `read_evidence` gives them back."""
    import tomli_w

    tables = [record.model_dump(mode="json", exclude_defaults=True, exclude_none=True) for record in records]
    return tomli_w.dumps({"evidence": tables})


def append_evidence(path: Path, records: Iterable[Evidence]) -> int:
    """Add records to `path`, those already there once; returns how many were new.

    The file is replaced in one step under a lock that the kernel releases with its process.

    Raises:
        LayoutError: the file is damaged, cannot be written, or another process holds its lock for long.
    """
    from filelock import FileLock, Timeout

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(path.name + ".lock"), timeout=LOCK_S):
            kept = read_evidence(path)
            there = {record.model_dump_json() for record in kept}
            fresh = {key: record for record in records if (key := record.model_dump_json()) not in there}
            if fresh:
                replace_text(path, evidence_text((*kept, *fresh.values())))
            return len(fresh)
    except Timeout:
        raise LayoutError(f"{path}: another process has held its lock for {LOCK_S:g} s; try again") from None
    except OSError as error:
        raise LayoutError(f"{path}: cannot be written: {error.strerror}") from None


@dataclass(frozen=True)
class Known:
    """All records at hand: those of presets and the user's."""

    records: tuple[Evidence, ...]
    problem: str | None = None
    """Why the user's records were left out, if they were."""

    def at(self, scope: Scope, model: str | None) -> tuple[Evidence, ...]:
        """Records of this class of machine and engine, and of this model where one is given."""
        return tuple(
            record
            for record in self.records
            if record.scope.same_place(scope) and (model is None or record.conditions.model in (None, model))
        )

    def elsewhere(self, scope: Scope, model: str | None) -> tuple[Evidence, ...]:
        """Records of this model that hold for other machines or engines: no advice here."""
        return tuple(
            record
            for record in self.records
            if not record.scope.same_place(scope) and model is not None and record.conditions.model == model
        )


def known_evidence(library: Library, path: Path | None = None) -> Known:
    """Records of the presets in `library` and of the user's file; a damaged file is named, not raised."""
    records = [record for preset in library.presets.values() for record in preset.evidence]
    problem = None
    try:
        records += read_evidence(evidence_file() if path is None else path)
    except LayoutError as error:
        problem = str(error)
    return Known(tuple({record.model_dump_json(): record for record in records}.values()), problem)


@dataclass(frozen=True)
class Measured:
    """What all figures of one bench or snapshot have in common."""

    model: str
    layout: str
    """Label of the degrees."""
    scope: Scope
    source: str
    measured_at: str | None = None
    where: str | None = None
    prompts: str | None = None


def from_bench(report: Mapping[str, Any], scope: Scope, layout: str, source: str) -> tuple[Evidence, ...]:
    """Records of a `ddtree bench --json` answer: decoding speed of one request, by case.

    Raises LayoutError naming what the answer lacks.
    """
    conditions, results = report.get("conditions"), report.get("results")
    if not isinstance(conditions, Mapping) or "model" not in conditions or not isinstance(results, list):
        raise LayoutError(
            f"{source}: no answer of 'ddtree bench --json' (conditions and results are missing)"
        )
    measured = Measured(
        model=model_name(str(conditions["model"])),
        layout=layout,
        scope=scope,
        source=source,
        measured_at=_text(conditions.get("measured_at")),
        where=_text(conditions.get("host")),
        prompts=_text(conditions.get("prompts")),
    )
    return from_figures(results, measured)


def from_figures(figures: Iterable[Any], measured: Measured) -> tuple[Evidence, ...]:
    """Records of figures as benches and snapshots keep them: mode, tree_budget, concurrency, tok_s, accept_length.

    Figures without a speed or a concurrency are left out. Raises LayoutError naming what is wrong in one.
    """
    found = []
    for figure in figures:
        if not isinstance(figure, Mapping):
            raise LayoutError(f"{measured.source}: a result is {figure!r}, not a table")
        if figure.get("tok_s") is None or figure.get("concurrency") is None:
            continue
        mode = figure.get("mode")
        at_s = figure.get("measured_at_s")
        when = measured.measured_at
        if isinstance(at_s, (int, float)):
            when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_s))
        try:
            found.append(
                Evidence(
                    unit="tok/s",
                    value=figure["tok_s"],
                    scope=measured.scope,
                    conditions=Conditions(
                        model=measured.model,
                        layout=measured.layout,
                        mode=mode,
                        tree_budget=figure.get("tree_budget") if mode == "tree" else None,
                        accept_length=figure.get("accept_length") if mode != "off" else None,
                        concurrency=figure["concurrency"],
                        temperature=figure.get("temperature"),
                        prompts=measured.prompts,
                    ),
                    measured_at=when,
                    where=measured.where,
                    source=measured.source,
                )
            )
        except ValidationError as error:
            raise LayoutError(f"{measured.source}: {explained(error, Evidence)}") from None
    return tuple(found)


def _text(value: object) -> str | None:
    return None if value is None else " ".join(str(value).split()) or None


def from_snapshot(
    config: Mapping[str, Any],
    environment: Mapping[str, Any],
    measurements: Mapping[str, Any],
    layout: str,
    source: str,
) -> tuple[Evidence, ...]:
    """Records of a snapshot's `config.toml`, `environment.toml` and `measurements.json`, in its own scope.

    Raises LayoutError where the snapshot does not say which hardware it was taken on.
    """
    hardware = environment.get("hardware")
    hardware = hardware if isinstance(hardware, Mapping) else {}
    gpus = [gpu for gpu in hardware.get("gpus") or () if isinstance(gpu, Mapping)]
    on_gpu = bool(gpus) and not str(config.get("device", "auto")).startswith("cpu")
    named = str(gpus[0].get("name") if on_gpu else hardware.get("cpu"))
    if named in ("", "n/a", "None"):
        raise LayoutError(f"{source}: environment.toml does not name the hardware, so there is no scope")
    software = environment.get("software")
    packages = software.get("packages") if isinstance(software, Mapping) else None
    wanted = ("torch",) if config.get("engine", "native") == "native" else ("sglang", "torch")
    versions = {
        name: str(packages[name])
        for name in wanted
        if isinstance(packages, Mapping) and packages.get(name) not in (None, "n/a")
    }
    degrees = Degrees.parse(layout)
    try:
        scope = Scope(
            hardware=named if on_gpu else cpu_class(named, config.get("threads")),
            devices=degrees.ranks if on_gpu and degrees else 1,
            interconnect=str(hardware.get("interconnect") or ("NVLink" if _linked(hardware) else "PCIe"))
            if on_gpu
            else "gloo",
            engine=config.get("engine", "native"),
            versions=versions,
        )
    except ValidationError as error:
        raise LayoutError(f"{source}: {explained(error, Scope)}") from None
    results = measurements.get("results")
    return from_figures(
        results if isinstance(results, list) else [],
        Measured(model_name(str(config.get("model", "model"))), layout, scope, source),
    )


def _linked(hardware: Mapping[str, Any]) -> bool:
    """Whether some pair of GPUs is joined by NVLink, as nvidia-smi names it (NV1, NV18, ...)."""
    links = [link for link in hardware.get("links") or () if isinstance(link, Mapping)]
    return any(str(link.get("kind", "")).startswith("NV") for link in links)


def bench_scope(report: Mapping[str, Any], hardware: str | None, devices: int, interconnect: str) -> Scope:
    """The scope of a bench of the native engine: `hardware` None = the CPU it names, with its threads."""
    conditions = report.get("conditions")
    conditions = conditions if isinstance(conditions, Mapping) else {}
    versions = {name: str(conditions[name]) for name in ("dtype", "torch") if conditions.get(name)}
    if hardware is None:
        hardware = cpu_class(str(conditions.get("cpu", "CPU")), conditions.get("threads"))
    return Scope(
        hardware=hardware, devices=devices, interconnect=interconnect, engine="native", versions=versions
    )


def cpu_class(name: str, threads: object) -> str:
    """What scopes call a CPU: its name and the threads in use."""
    plain = " ".join("".join(char if char.isprintable() else " " for char in name).split()) or "CPU"
    return f"{plain}, {threads} threads" if isinstance(threads, int) else plain

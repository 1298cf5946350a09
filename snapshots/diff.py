"""What differs between two snapshots: settings, results, host, patches and units; and whether figures came back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from snapshots.annotate import figure_line, shown
from snapshots.content import UNKNOWN, Figure, PatchedFile, Snapshot

TOK_S_TOLERANCE = 0.10
"""Share by which tok/s may fall before figures count as not back; a shared host moves them that much."""
ACCEPT_TOLERANCE = 0.05


@dataclass(frozen=True)
class Difference:
    """One thing that is not the same; "n/a" stands for absent or not known."""

    name: str
    before: str
    after: str


@dataclass(frozen=True)
class ResultRow:
    """The figures of one mode, budget, temperature and concurrency on both sides; None where one side has none."""

    name: str
    before: Figure | None
    after: Figure | None

    @property
    def comparable(self) -> bool:
        """Whether both rows were measured in the same way."""
        return self.before is not None and self.after is not None and same_conditions(self.before, self.after)


@dataclass(frozen=True)
class SnapshotDiff:
    """Everything that differs from `before` to `after`."""

    settings: tuple[Difference, ...]
    results: tuple[ResultRow, ...]
    host: tuple[Difference, ...]
    patches: tuple[Difference, ...]
    units: tuple[Difference, ...]


def compare(before: Snapshot, after: Snapshot) -> SnapshotDiff:
    """What changed from one snapshot to another; equal things are left out, results are shown in full."""
    return SnapshotDiff(
        settings=settings(before.config, after.config),
        results=tuple(_results(before, after)),
        host=host(before, after),
        patches=_between(_patch_words(before.patches), _patch_words(after.patches)),
        units=_between(
            {unit.name: unit.content for unit in before.services},
            {unit.name: unit.content for unit in after.services},
        ),
    )


def settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Settings that differ; a setting only one side knows is "n/a" on the other."""
    return _between(
        {name: _text(value) for name, value in before.items()}, {n: _text(v) for n, v in after.items()}
    )


def host(before: Snapshot, after: Snapshot) -> tuple[Difference, ...]:
    """Hardware, toolkits, versions, variables and model files that differ."""
    sides = []
    for snapshot in (before, after):
        environment = snapshot.environment.model_dump()
        files = {f"{each['role']} {each['path']}": each["sha256"] for each in environment.pop("files")}
        sides.append(dict(_flat({"host": snapshot.host.name, **environment, "files": files})))
    return _between(*sides)


def verdict(
    then: Figure | None, now: Figure | None, hardware: tuple[str, str] | None = None
) -> tuple[bool | None, str]:
    """Whether the figures of a snapshot are back, and one true line about it; None where that cannot be told.

    Args:
        hardware: the class it was taken on and the class here, where both are known.
    """
    if now is None:
        return None, "cannot tell whether the figures are back: not measured"
    here = f"{shown(now.tok_s)} tok/s, accept length {shown(now.accept_length, digits=2)}"
    if then is None:
        return None, f"cannot tell whether the figures are back: the snapshot has none; now {here}"
    was = f"{shown(then.tok_s)} tok/s, accept length {shown(then.accept_length, digits=2)}"
    if not same_conditions(then, now):
        return None, (
            f"cannot tell whether the figures are back: then {was} ({then.source}: {then.conditions or UNKNOWN}), "
            f"now {here} ({now.source}: {now.conditions or UNKNOWN}); not measured alike"
        )
    back = _held(then.tok_s, now.tok_s, TOK_S_TOLERANCE) and _held(
        then.accept_length, now.accept_length, ACCEPT_TOLERANCE
    )
    elsewhere = (
        f"; on other hardware ({hardware[0]} then, {hardware[1]} now)"
        if hardware and len(set(hardware)) > 1
        else ""
    )
    return back, f"figures are {'back' if back else 'not back'}: now {here}; then {was}{elsewhere}"


def same_conditions(one: Figure, other: Figure) -> bool:
    """Whether two rows may be compared: same mode, budget, temperature, load and way of measuring."""
    controlled = {"bench", "probe"}
    alike = one.source == other.source or {one.source, other.source} <= controlled
    return alike and one.source != "live" and one.key == other.key and one.conditions == other.conditions


def text(found: SnapshotDiff) -> Iterator[str]:
    """The difference for people."""
    yield "settings:"
    yield from _lines(found.settings)
    yield "results:"
    for row in found.results:
        yield f"  {row.name}" + (
            "" if row.comparable else "  (not measured alike)" if row.before and row.after else ""
        )
        for word, figure in (("before", row.before), ("after", row.after)):
            yield f"    {word:<7}{figure_line(figure) if figure else UNKNOWN}"
    if not found.results:
        yield "  none on either side"
    yield "host:"
    yield from _lines(found.host)
    yield "patched files:"
    yield from _lines(found.patches)
    yield "units:"
    yield from (f"  {each.name}: {_presence(each)}" for each in found.units)
    if not found.units:
        yield "  the same"


def _presence(difference: Difference) -> str:
    if difference.before == UNKNOWN:
        return "only in the second"
    return "only in the first" if difference.after == UNKNOWN else "differs"


def _lines(differences: tuple[Difference, ...]) -> Iterator[str]:
    if not differences:
        yield "  the same"
    for each in differences:
        yield f"  {each.name}: {each.before} -> {each.after}"


def _results(before: Snapshot, after: Snapshot) -> Iterator[ResultRow]:
    sides = []
    for snapshot in (before, after):
        rows: dict[tuple[Any, ...], Figure] = {}
        for figure in snapshot.measurements.results:
            rows[(figure.source == "live", *figure.key)] = figure
        sides.append(rows)
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        _, mode, budget, temperature, concurrency = key
        name = f"{mode}" + (f" {budget}" if mode == "tree" else "") + f", T {shown(temperature)}"
        yield ResultRow(f"{name}, concurrency {shown(concurrency)}", sides[0].get(key), sides[1].get(key))


def _between(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[Difference, ...]:
    names = dict.fromkeys([*before, *after])
    pairs = ((name, before.get(name, UNKNOWN), after.get(name, UNKNOWN)) for name in sorted(names))
    return tuple(Difference(*each) for each in pairs if each[1] != each[2])


def _patch_words(patches: tuple[PatchedFile, ...]) -> dict[str, str]:
    return {
        " ".join(filter(None, (file.environment, file.package, file.path))): (
            f"{file.kind} in {file.version}, {(file.sha256 or UNKNOWN)[:12]}"
        )
        for file in patches
    }


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _flat(each, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _flat(each, f"{name}[{number}]")
    else:
        yield name, _text(value)


def _text(value: Any) -> str:
    return UNKNOWN if value is None else str(value)


def _held(then: float | None, now: float | None, tolerance: float) -> bool:
    if then is None:
        return True
    return now is not None and now >= then * (1 - tolerance)

"""A snapshot as the files of its commit, and back.

`config.toml` and `environment.toml` are canonical (sorted keys), so that a plain `git diff` of two snapshots is small.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from snapshots.annotate import note_of, readme
from snapshots.content import (
    UNKNOWN,
    Environment,
    HostIdentity,
    Measurements,
    PackageState,
    PatchedFile,
    Snapshot,
    UnitFile,
)
from snapshots.git import StoreFault

CONFIG, ENVIRONMENT, MEASUREMENTS, README = (
    "config.toml",
    "environment.toml",
    "measurements.json",
    "README.md",
)
PATCH_INDEX, UNIT_INDEX = "patches/index.json", "services/index.json"
SCHEMA = 1
Model = TypeVar("Model", bound=BaseModel)


class Unreadable(StoreFault):
    """The files of a commit are no snapshot."""


def to_files(snapshot: Snapshot, snapshot_id: str = "COMMIT") -> dict[str, bytes]:
    """The files of the commit: path to content."""
    about = {"label": snapshot.label, "taken_at_s": snapshot.taken_at_s, **snapshot.host.model_dump()}
    environment = {"schema": SCHEMA, "snapshot": about, **snapshot.environment.model_dump()}
    files = {
        CONFIG: _toml(snapshot.config),
        ENVIRONMENT: _toml(environment),
        MEASUREMENTS: _json(snapshot.measurements.model_dump()),
        README: readme(snapshot, snapshot_id),
    }
    files.update(_patch_files(snapshot))
    files.update(_unit_files(snapshot))
    return files


def from_files(files: Mapping[str, bytes]) -> Snapshot:
    """The snapshot that `files` hold; raises Unreadable naming the file that is missing or wrong."""
    try:
        return _from_files(files)
    except Unreadable:
        raise
    except (AttributeError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise Unreadable(f"the files are no snapshot: {_first(error)}") from None


def _from_files(files: Mapping[str, bytes]) -> Snapshot:
    environment = _read_toml(files, ENVIRONMENT)
    about = environment.pop("snapshot", {})
    environment.pop("schema", None)
    patches = _read_json(files, PATCH_INDEX) if PATCH_INDEX in files else {}
    units = _read_json(files, UNIT_INDEX) if UNIT_INDEX in files else {}
    return Snapshot(
        config=_read_toml(files, CONFIG),
        environment=_model(Environment, _known(environment), ENVIRONMENT),
        measurements=_model(Measurements, _read_json(files, MEASUREMENTS), MEASUREMENTS),
        packages=tuple(_package(each, files) for each in patches.get("packages", ())),
        patches=tuple(_patch(each, files) for each in patches.get("files", ())),
        services=tuple(_unit(each, files) for each in units.get("units", ())),
        note=note_of(files.get(README, b"")),
        label=str(about.pop("label", "")),
        taken_at_s=float(about.pop("taken_at_s", 0.0)),
        host=_model(HostIdentity, about, ENVIRONMENT),
    )


def stored_name(path: str) -> str:
    """`path` as a name git and any file system keep: no ".git", no "..", nothing unprintable; "%" escapes the rest."""
    return "/".join(_stored_part(part) for part in path.split("/") if part)


def _stored_part(part: str) -> str:
    text = "".join(
        char
        if char.isprintable() and char not in '%\\:*?"<>|'
        else "".join(f"%{byte:02X}" for byte in _utf8(char))
        for char in part
    )
    risky = set(part) <= {"."} or part.lower().startswith((".git", "git~"))
    return "%" + f"{ord(text[0]):02X}" + text[1:] if risky else text


def _patch_files(snapshot: Snapshot) -> Iterator[tuple[str, bytes]]:
    if not snapshot.patches and not snapshot.packages:
        return
    entries = []
    for file in snapshot.patches:
        folder = f"patches/{_stored_package(file.environment, f'{file.package}-{file.version}')}"
        entry = file.model_dump(exclude={"content", "original"})
        for side, content in (("now", file.content), ("wheel", file.original), ("diff", _diff(file))):
            if content is not None:
                entry[side] = f"{folder}/{side}/{stored_name(file.path)}" + (
                    ".diff" if side == "diff" else ""
                )
                yield entry[side], content
        entries.append(entry)
    packages = []
    for state in snapshot.packages:
        entry = state.model_dump(exclude={"diff"})
        if state.diff:
            entry["diff"] = f"patches/{_stored_package(state.environment, state.package)}.source.diff"
            yield entry["diff"], _utf8(state.diff)
        packages.append(entry)
    yield PATCH_INDEX, _json({"schema": SCHEMA, "packages": packages, "files": entries})


def _stored_package(environment: str, name: str) -> str:
    """The folder of a package; the same version may be patched in two environments."""
    return (f"{environment}/" if environment else "") + stored_name(name.replace("/", "_"))


def _diff(file: PatchedFile) -> bytes | None:
    text = patch_diff(file)
    return None if text is None else _utf8(text)


def patch_diff(patch: PatchedFile) -> str | None:
    """The unified diff from the wheel's file to the one found; None where the original is out of reach."""
    if patch.original is None and patch.kind != "added":
        return None
    if patch.content is None and patch.kind != "missing":
        return None
    before, after = patch.original or b"", patch.content or b""
    names = f"a/{patch.path}", f"b/{patch.path}"
    if b"\0" in before or b"\0" in after:
        return f"Binary files {names[0]} and {names[1]} differ\n"
    old = "/dev/null" if patch.kind == "added" else names[0]
    new = "/dev/null" if patch.kind == "missing" else names[1]
    return "".join(_marked(difflib.unified_diff(_lines(before), _lines(after), fromfile=old, tofile=new)))


def _lines(content: bytes) -> list[str]:
    return content.decode("utf-8", "replace").splitlines(keepends=True)


def _marked(lines: Iterator[str]) -> Iterator[str]:
    """A diff's lines; one without an end of line gets git's remark."""
    for line in lines:
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _unit_files(snapshot: Snapshot) -> Iterator[tuple[str, bytes]]:
    if not snapshot.services:
        return
    entries = []
    for unit in snapshot.services:
        stored = f"services/{stored_name(unit.name.replace('/', '_'))}"
        entries.append({"name": unit.name, "path": unit.path, "stored": stored})
        yield stored, _utf8(unit.content)
    yield UNIT_INDEX, _json({"schema": SCHEMA, "units": entries})


def _package(entry: dict[str, Any], files: Mapping[str, bytes]) -> PackageState:
    diff = entry.pop("diff", None)
    text = files.get(diff, b"").decode("utf-8", "replace") if diff else ""
    return _model(PackageState, {**entry, "diff": text}, PATCH_INDEX)


def _patch(entry: dict[str, Any], files: Mapping[str, bytes]) -> PatchedFile:
    entry.pop("diff", None)
    sides = {"content": entry.pop("now", None), "original": entry.pop("wheel", None)}
    contents = {side: _taken(files, name) if name else None for side, name in sides.items()}
    try:
        return PatchedFile(**entry, **contents)
    except (TypeError, ValidationError) as error:
        raise Unreadable(f"{PATCH_INDEX}: {_first(error)}") from None


def _unit(entry: dict[str, Any], files: Mapping[str, bytes]) -> UnitFile:
    content = _taken(files, str(entry.pop("stored", ""))).decode("utf-8", "replace")
    return _model(UnitFile, {**entry, "content": content}, UNIT_INDEX)


def _taken(files: Mapping[str, bytes], name: str) -> bytes:
    if name not in files:
        raise Unreadable(f"{name} is missing from the snapshot")
    return files[name]


def _toml(values: Mapping[str, Any]) -> bytes:
    import tomli_w

    return _utf8(tomli_w.dumps(_canonical(values)))


def _canonical(value: Any) -> Any:
    """Sorted keys, text that UTF-8 holds, "n/a" for what is not known."""
    if value is None:
        return UNKNOWN
    if isinstance(value, str):
        return _utf8(value).decode("utf-8")
    if isinstance(value, Mapping):
        return {_utf8(str(key)).decode("utf-8"): _canonical(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [_canonical(each) for each in value]
    return value


def _known(value: Any) -> Any:
    """What `_canonical` wrote, with None where it is not known."""
    if isinstance(value, dict):
        return {key: _known(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_known(each) for each in value]
    return None if value == UNKNOWN else value


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def _read_toml(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(_taken(files, name).decode("utf-8"))
    except (
        ValueError,
        RecursionError,
    ) as error:  # not UTF-8, no TOML, or numbers and brackets beyond all measure
        raise Unreadable(f"{name} cannot be read: {error}") from None


def _read_json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        value = json.loads(_taken(files, name))
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{name} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise Unreadable(f"{name} cannot be read: it is no object")
    return value


def _model(kind: type[Model], values: Mapping[str, Any], name: str) -> Model:
    try:
        return kind(**values)
    except (TypeError, ValidationError) as error:
        raise Unreadable(f"{name}: {_first(error)}") from None


def _first(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return re.sub(r"\s+", " ", str(error))


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")

"""Saving a snapshot: the runtime's settings and figures, this host, patched files and units, checked for secrets.

The save itself asks the runtime for what it knows already and starts no request; a bench is a second commit.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.interface import Runtime
from snapshots import live
from snapshots.content import (
    Environment,
    Figure,
    HostIdentity,
    Measurements,
    Snapshot,
    checked_label,
    checked_note,
    hardware_class,
)
from snapshots.git import StoreFault, StoreRefused
from snapshots.installed import Elsewhere, elsewhere
from snapshots.message import Entry, Kind
from snapshots.originals import Originals
from snapshots.patches import DEFAULT_PACKAGES, examine_all
from snapshots.secrets import Hit, scan
from snapshots.store import Store

SEARCHED = 100
"""Newest snapshots in which an original is looked for."""
JUST_KEPT_S = 60.0
"""An automatic snapshot of the same settings that is not older stands for another one."""


class SecretFound(StoreRefused):
    """A note or a patched file holds what looks like a secret; `hits` say where."""

    def __init__(self, hits: Sequence[Hit]) -> None:
        places = "; ".join(str(hit) for hit in hits[:5]) + ("; ..." if len(hits) > 5 else "")
        super().__init__(f"not saved, it looks like a secret: {places}; take it out, or use --allow-secret")
        self.hits = tuple(hits)


@dataclass(frozen=True)
class SaveRequest:
    """What the operator says of a snapshot to be saved."""

    label: str = ""
    note: str = ""
    packages: tuple[str, ...] = DEFAULT_PACKAGES
    units: tuple[str, ...] = ()
    running_units: bool = True
    """Also units of ddtree and SGLang that run now."""
    allow_secret: bool = False
    fetch_originals: bool = False
    """Wheels of patched packages may be downloaded, for the diff."""
    bench_file: Path | None = None
    """An answer of `ddtree bench --json` whose figures are kept too."""


async def save_running(store: Store, runtime: Runtime, request: SaveRequest) -> Entry:
    """Commit what `runtime` runs with at this moment; disturbs none of its requests."""
    check_words(request)
    seen = await live.observed(runtime, request.label, request.note)
    return await asyncio.to_thread(_commit, store, seen, request, seen.host.name == live.here())


async def save_resolved(store: Store, config: dict[str, Any], request: SaveRequest) -> Entry:
    """Commit the settings a runtime would start with; marked "not running, not measured"."""
    check_words(request)
    snapshot = live.not_running(config, request.label, request.note)
    return await asyncio.to_thread(_commit, store, snapshot, request, True)


async def measure(
    store: Store,
    entry: Entry,
    runtime: Runtime,
    under_load: bool = False,
    progress: Callable[[str], None] = lambda _line: None,
) -> Figure:
    """Take the standard bench of what runs and attach it to a snapshot as a commit of its own."""
    figure = await live.standard_bench(runtime, under_load, progress)
    await asyncio.to_thread(attach, store, entry, figure)
    return figure


def attach(store: Store, entry: Entry, figure: Figure) -> Entry:
    """Commit a figure for a snapshot that is there already; its history stays as it is."""
    _, snapshot = store.load(entry.commit)
    earlier = tuple(
        each
        for each in snapshot.measurements.results
        if each.source != figure.source or each.key != figure.key
    )
    measured = Measurements(
        state=f"{snapshot.measurements.state}; measured later", results=(*earlier, figure)
    )
    followed = snapshot.model_copy(
        update={
            "measurements": measured,
            "label": f"measurement of {snapshot.label or entry.id}"[:120].rstrip(),
            "note": "",
        }
    )
    return store.save(followed, "measure", {"Measures": entry.commit})


def keep_before(
    store: Store, seen: Snapshot, change: str, packages: Iterable[str] = (), newest: int = 1
) -> Entry:
    """Commit what ran before `change` as an automatic snapshot, unless that was done a moment ago.

    Args:
        packages: further ones whose files may be about to change.
        newest: among how many entries one that was just made counts.

    Raises:
        StoreFault: it cannot be kept.
    """
    digest = hashlib.sha256(json.dumps(seen.config, sort_keys=True).encode()).hexdigest()[:16]
    for entry in store.list(limit=newest).entries:
        recent = abs(seen.taken_at_s - entry.time_s) < JUST_KEPT_S
        if entry.kind == "auto" and entry.trailers.get("config") == digest and recent:
            return entry
    words = "".join(char if char.isprintable() else " " for char in f"before {change}")
    named = seen.model_copy(update={"label": words[:120].strip()})
    is_here = seen.host.name == live.here()
    request = SaveRequest(packages=(*DEFAULT_PACKAGES, *packages))
    return _commit(store, named, request, is_here, "auto", {"Config": digest})


def check_words(request: SaveRequest) -> None:
    """Raises SecretFound for a secret in the label or the note, NoteRefused for what git cannot keep."""
    checked_label(request.label)
    checked_note(request.note)
    hits = [*scan(request.label, "label"), *scan(request.note, "note")]
    if hits and not request.allow_secret:
        raise SecretFound(hits)


def model_files(config: dict[str, Any]) -> tuple[Path | None, Path | None]:
    """Where the files of target and drafter lie, as far as the configuration tells."""
    import runtime
    from runtime.config import DEFAULT_MODEL
    from runtime.model_fetch import cached_default

    model, drafter = str(config.get("model") or ""), config.get("drafter")
    target = cached_default() if model == DEFAULT_MODEL else Path(model).expanduser()
    if drafter in (None, "auto"):
        shipped = Path(runtime.__path__[0]) / "drafters" / model
        return target, shipped if "/" not in model and (shipped / "config.json").is_file() else None
    return target, None if drafter == "none" else Path(str(drafter)).expanduser()


def sglang_environment(config: dict[str, Any]) -> Elsewhere | None:
    """SGLang's own virtual environment as the configuration names it; None where there is none that answers."""
    python = config.get("sglang_python")
    return elsewhere(str(python)) if python else None


def bench_figures(path: Path) -> tuple[Figure, ...]:
    """The rows of an answer of `ddtree bench --json`; raises StoreFault where it is none."""
    try:
        answer = json.loads(path.read_text(encoding="utf-8").strip().splitlines()[-1])
        conditions = ", ".join(
            f"{name} {value}" for name, value in answer["conditions"].items() if value not in (None, "")
        )
        return tuple(
            Figure(
                source="bench",
                mode=row["mode"],
                tree_budget=row["tree_budget"],
                temperature=row["temperature"],
                concurrency=row["concurrency"],
                tok_s=row["tok_s"],
                total_tok_s=row.get("total_tok_s"),
                accept_length=row["accept_length"],
                ttft_s=row.get("ttft_s"),
                measured_at_s=path.stat().st_mtime,
                conditions=f"ddtree bench: {conditions}"[:400],
            )
            for row in answer["results"]
        )
    except OSError as error:
        raise StoreFault(f"bench result {path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise StoreFault(f"{path} is no answer of 'ddtree bench --json'") from None


def _commit(
    store: Store,
    snapshot: Snapshot,
    request: SaveRequest,
    is_here: bool,
    kind: Kind = "save",
    extra: dict[str, str] | None = None,
) -> Entry:
    from snapshots import environment, services

    benches = bench_figures(request.bench_file) if request.bench_file else ()
    update: dict[str, Any] = {
        "measurements": snapshot.measurements.model_copy(
            update={"results": (*snapshot.measurements.results, *benches)}
        )
    }
    if is_here:
        other = sglang_environment(snapshot.config)
        here = environment.capture(*model_files(snapshot.config), sglang=other)
        originals = Originals(earlier=earlier_contents(store), fetch=request.fetch_originals)
        examined = examine_all(request.packages, other, originals=originals)
        update |= {
            "environment": here,
            "host": HostIdentity(name=snapshot.host.name, hardware=hardware_class(here.hardware)),
            "packages": examined.packages,
            "patches": examined.patches,
            "services": services.capture(request.units, running=request.running_units),
        }
    else:
        update["environment"] = Environment()
    whole = snapshot.model_copy(update=update)
    if not request.allow_secret and (hits := list(_patch_secrets(whole))):
        raise SecretFound(hits)
    return store.save(whole, kind, extra)


def _patch_secrets(snapshot: Snapshot) -> Iterable[Hit]:
    for file in snapshot.patches:
        yield from scan((file.content or b"").decode("utf-8", "replace"), file.path)
    for state in snapshot.packages:
        yield from scan(state.diff, f"diff of {state.package}")


def earlier_contents(store: Store) -> Callable[[str], bytes | None]:
    """Contents of patched files and their originals in the newest snapshots that have any, by SHA-256."""
    found: dict[str, bytes] = {}
    entries: list[Entry] | None = None

    def find(sha256: str) -> bytes | None:
        nonlocal entries
        if entries is None:
            newest = store.list(limit=SEARCHED).entries
            entries = [entry for entry in newest if entry.trailers.get("patched-files", "0") != "0"]
        while sha256 not in found and entries:
            for file in store.load(entries.pop(0).commit)[1].patches:
                for name, content in ((file.sha256, file.content), (file.original_sha256, file.original)):
                    if name is not None and content is not None:
                        found[name] = content
        return found.get(sha256)

    return find

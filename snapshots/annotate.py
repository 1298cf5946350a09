"""README.md of a snapshot: a page for a colleague, in the shape an engineer writes by hand.

The operator's note stands first, byte for byte; a comment line after it says how long it is, so that it can be read
back exactly.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

from snapshots.content import UNKNOWN, Figure, Gpu, Hardware, PackageState, PatchedFile, Snapshot

_MARK = "<!-- ddtree: the note above has {} bytes -->"
_FIND = re.compile(rb"<!-- ddtree: the note above has (\d+) bytes -->")


def readme(snapshot: Snapshot, snapshot_id: str = "COMMIT") -> bytes:
    """The page; `snapshot_id` is what `ddtree snapshot rollback` is told."""
    note = snapshot.note.encode("utf-8")
    body = "\n".join(_safe(line) for line in _body(snapshot, snapshot_id))
    return note + f"\n\n{_MARK.format(len(note))}\n\n{body}\n".encode()


def note_of(page: bytes) -> str:
    """The operator's note out of a page of `readme`; empty where it has none of ours."""
    found = list(_FIND.finditer(page))
    length = int(found[-1][1]) if found else 0
    return page[:length].decode("utf-8", "replace")


def headline(snapshot: Snapshot) -> Figure | None:
    """The row that stands for the snapshot: of its own mode and budget, a bench before live traffic before start-up."""
    order = {"probe": 0, "bench": 1, "live": 2, "baseline": 3}
    mode, budget = snapshot.config.get("mode"), snapshot.config.get("tree_budget")
    own = [
        figure
        for figure in snapshot.measurements.results
        if (figure.mode == mode and (mode != "tree" or budget in ("auto", None, figure.tree_budget)))
        # Auto mode has no setting of its own: what it decoded is told by the setting it mostly chose.
        or (mode == "auto" and figure.source != "baseline")
    ]
    return min(own, key=lambda figure: (order[figure.source], -(figure.requests or 0)), default=None)


def shown(value: float | int | str | None, unit: str = "", digits: int = 1) -> str:
    """A figure for people; "n/a" where it is not known."""
    if value is None:
        return UNKNOWN
    text = f"{value:.{digits}f}" if isinstance(value, float) else str(value)
    return f"{text} {unit}" if unit else text


def bytes_shown(count: int | None) -> str:
    """Bytes in GiB."""
    return UNKNOWN if count is None else f"{count / 2**30:.1f} GiB"


def when(taken_at_s: float) -> str:
    """Unix time as a date in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(taken_at_s))


def figure_line(figure: Figure) -> str:
    """One measured row with its conditions."""
    mode = f"{figure.mode}, budget {shown(figure.tree_budget)}" if figure.mode == "tree" else figure.mode
    parts = [
        f"{shown(figure.tok_s)} tok/s",
        f"accept length {shown(figure.accept_length, digits=2)} (tokens per decode round, bonus token included)",
        f"TTFT {_seconds(figure.ttft_s)}",
        f"TPOT {_seconds(figure.tpot_s)}",
    ]
    with_what = [f"T {shown(figure.temperature, digits=2)}", f"concurrency {shown(figure.concurrency)}"]
    with_what += [f"{shown(figure.requests)} requests"]
    if figure.window_s is not None:
        with_what.append(f"over {figure.window_s:.0f} s")
    if figure.conditions:
        with_what.append(figure.conditions)
    return f"{mode} ({figure.source}): {', '.join(parts)}; {', '.join(with_what)}"


def _seconds(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def _body(snapshot: Snapshot, snapshot_id: str) -> Iterator[str]:
    config = snapshot.config
    yield f"# {snapshot.label or 'Snapshot ' + snapshot_id}"
    yield ""
    yield "## What this is"
    yield ""
    yield (
        f"The working configuration of {config.get('model', UNKNOWN)} on {snapshot.host.name}, taken "
        f"{when(snapshot.taken_at_s)}: layout {config.get('layout', UNKNOWN)}, mode {config.get('mode', UNKNOWN)}, "
        f"tree budget {config.get('tree_budget', UNKNOWN)}, temperature {config.get('temperature', UNKNOWN)}. "
        "All settings are in config.toml."
    )
    yield ""
    yield "## Environment"
    yield ""
    yield from (f"- {line}" for line in _environment(snapshot))
    yield ""
    yield "## Findings"
    yield ""
    yield f"Scope: {snapshot.host.hardware} ({snapshot.host.name}). Other hardware may rank these modes differently."
    yield ""
    yield f"State when it was taken: {snapshot.measurements.state}."
    yield from (f"- {figure_line(figure)}" for figure in snapshot.measurements.results)
    yield ""
    yield "## Patches"
    yield ""
    yield from _patches(snapshot)
    yield ""
    yield "## Files"
    yield ""
    yield from _files(snapshot)
    yield ""
    yield "## How to return to it"
    yield ""
    yield f"    ddtree snapshot rollback {snapshot_id} --dry-run"
    yield f"    ddtree snapshot rollback {snapshot_id}"


def _environment(snapshot: Snapshot) -> Iterator[str]:
    environment = snapshot.environment
    software, toolkits = environment.software, environment.toolkits
    yield from _hardware(environment.hardware)
    yield f"CUDA toolkit in use: {shown(toolkits.in_use)} (by {shown(toolkits.chosen_by)})"
    yield from (f"CUDA toolkit found: {each.path}, nvcc {shown(each.nvcc)}" for each in toolkits.found)
    yield f"OS {shown(software.os)}, kernel {shown(software.kernel)}, container {shown(software.container)}"
    versions = [f"{name} {shown(version)}" for name, version in sorted(software.packages.items())]
    yield ", ".join([f"Python {shown(software.python)}", *versions])
    if environment.sglang is not None:
        there = sorted(environment.sglang.packages.items())
        versions = [f"{name} {version}" for name, version in there if version is not None]
        yield ", ".join([f"SGLang's own environment: Python {shown(environment.sglang.python)}", *versions])
    yield from (f"{name}={value}" for name, value in sorted(environment.variables.items()))


def _hardware(hardware: Hardware) -> Iterator[str]:
    yield (
        f"{shown(hardware.cpu)}, {shown(hardware.cpu_count)} cores, {bytes_shown(hardware.memory_bytes)} memory, "
        f"{shown(hardware.machine)}"
    )
    if not hardware.gpus:
        yield f"GPUs: {hardware.gpu_note or UNKNOWN}"
        return
    yield f"Driver {shown(hardware.driver)} (CUDA up to {shown(hardware.driver_cuda)})"
    yield from (f"GPU {gpu.index}: {_gpu(gpu)}" for gpu in hardware.gpus)
    kinds = sorted({link.kind for link in hardware.links})
    yield f"GPU links: {', '.join(kinds) or UNKNOWN}"


def _gpu(gpu: Gpu) -> str:
    now = f"generation {shown(gpu.pcie_generation_now)} x{shown(gpu.pcie_width_now)}"
    most = f"generation {shown(gpu.pcie_generation_possible)} x{shown(gpu.pcie_width_possible)}"
    return (
        f"{shown(gpu.name)}, {bytes_shown(gpu.memory_bytes)}, compute capability {shown(gpu.compute_capability)}, "
        f"PCIe {now} of {most}, NUMA node {shown(gpu.numa_node)}"
    )


def _patches(snapshot: Snapshot) -> Iterator[str]:
    if not snapshot.patches and not snapshot.packages:
        yield "No package was compared with its wheel."
    absent = [_named(state) for state in snapshot.packages if state.install == "absent"]
    if absent:
        yield f"- not installed: {', '.join(absent)}"
    for state in snapshot.packages:
        if state.install == "absent":
            continue
        told = f"{_named(state)} {shown(state.version)} ({state.install})"
        if state.install == "wheel":
            told += f": {state.vanilla} of {state.files} files are as the wheel has them"
        elif state.describe:
            told += f": {state.describe}"
        yield f"- {told}"
    for file in snapshot.patches:
        yield f"- {file.kind}: {file.path} (for {_named(file)} {file.version})"
    if snapshot.patches:
        yield ""
        yield "A patch holds for the version named beside it; for a newer one check whether it is still needed."


def _named(package: PackageState | PatchedFile) -> str:
    return (
        f"{package.package} in {package.environment}'s environment"
        if package.environment
        else package.package
    )


def _files(snapshot: Snapshot) -> Iterator[str]:
    yield "- config.toml: every setting; usable with --config"
    yield "- environment.toml: host, toolkits, versions, hashes of target and drafter"
    yield "- measurements.json: figures with their conditions"
    if snapshot.patches or snapshot.packages:
        yield "- patches/: changed and added files, with diffs where the original is known"
    for unit in snapshot.services:
        yield f"- services/{unit.name}: from {unit.path}"


def _safe(line: str) -> str:
    """One line that cannot end the page early or be taken for the mark."""
    return "".join(char if char.isprintable() else " " for char in line).replace("<!--", "&lt;!--")

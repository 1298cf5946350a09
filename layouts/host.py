"""The host a layout is planned for: which known class of hardware its devices are, and how many there are."""

from __future__ import annotations

import importlib
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from layouts.evidence import cpu_class
from layouts.library import Library, drafter_from_config, shape_from_config
from layouts.shapes import Hardware, ModelShape
from layouts.values import Frozen, LayoutError

CPU = "cpu"
GIB = 2**30


class Device(Frozen):
    """One GPU as its driver names it."""

    name: str
    memory: int | None = None
    """Bytes."""


class Host(Frozen):
    """What a plan is made for."""

    hardware: Hardware
    devices: int
    """GPUs; of a CPU as many ranks as anyone cares to start."""
    known: bool = True
    """False: a device no file describes, so nothing can be predicted before something was measured."""
    note: str = ""

    @property
    def words(self) -> str:
        if self.hardware.device == "cpu":
            return f"{self.hardware.class_name}, no GPU"
        return f"{self.devices} x {self.hardware.class_name}, {self.hardware.interconnect}"


def host_of(
    library: Library,
    gpus: Sequence[Device],
    *,
    cpu: str | None = None,
    threads: int | None = None,
    memory: int | None = None,
) -> Host:
    """The host with `gpus`, or without any the one with this CPU, `threads` in use and `memory` bytes."""
    if not gpus:
        hardware = library.device(CPU)
        title = cpu_class(cpu or "CPU", threads)
        update = {"class_name": title, "memory_gib": memory / GIB if memory else hardware.memory_gib}
        return Host(hardware=hardware.model_copy(update=update), devices=RANKS_ON_A_CPU)
    first = gpus[0]
    alike = [gpu for gpu in gpus if gpu.name == first.name]
    note = "" if len(alike) == len(gpus) else f"planned for the {len(alike)} devices named {first.name} alone"
    found = match(library, first.name)
    hardware = found or Hardware(
        name="unknown-gpu",
        title=first.name or "GPU",
        class_name=first.name or "GPU",
        sources=("what the driver says",),
        interconnect="interconnect not known",
    )
    if first.memory:
        hardware = hardware.model_copy(update={"memory_gib": first.memory / GIB})
    return Host(hardware=hardware, devices=len(alike), known=found is not None, note=note)


RANKS_ON_A_CPU = 2
"""Processes a CPU is planned for: what the native engine uses there."""


def match(library: Library, name: str) -> Hardware | None:
    """The hardware whose file says that its devices are called like `name`; the most precise match."""
    found = [
        (max(len(part) for part in hardware.match if part in name), hardware)
        for hardware in library.hardware.values()
        if any(part in name for part in hardware.match) and not any(part in name for part in hardware.exclude)
    ]
    return max(found, key=lambda each: each[0])[1] if found else None


def given_host(library: Library, name: str, devices: int) -> Host:
    """A host named by hand; raises LayoutError for hardware no file describes."""
    return Host(hardware=library.device(name), devices=devices)


def cpu_name() -> str | None:
    """What this machine's CPU calls itself; None where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)


def cpu_threads() -> int:
    """Physical cores this process may use: the threads the native engine takes unless told otherwise."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        psutil = importlib.import_module("psutil")
    except ImportError:
        return max(1, allowed)
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


def shape_of(library: Library, model: str, drafter: str | None = None) -> ModelShape:
    """Dimensions of a configured target: by name, or from the `config.json` of its folder.

    `drafter` is a folder in DFlash format, "none", or None for the one that belongs to the model.

    Raises:
        LayoutError: no such model, a file without dimensions that can be read here, or a damaged one.
    """
    folder = Path(model).expanduser()
    if model in library.models:
        shape = library.models[model]
    elif folder.is_dir():
        shape = shape_from_config(folder.resolve().name, _config_json(folder))
    elif folder.suffix.lower() == ".gguf":
        raise LayoutError(
            f"model {model}: dimensions of a GGUF file are not read here; make a folder of it with "
            "'ddtree model convert'"
        )
    else:
        shape = library.model(model)
    if drafter is None:
        return shape
    found = (
        None if drafter == "none" else drafter_from_config(drafter, _config_json(Path(drafter).expanduser()))
    )
    return shape.model_copy(update={"drafter": found})


def _config_json(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LayoutError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise LayoutError(f"{path}: not JSON in UTF-8") from None
    if not isinstance(values, dict):
        raise LayoutError(f"{path}: must hold one JSON object")
    return values

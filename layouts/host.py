"""The host a layout is planned for: which known class of hardware its devices are, and how many there are."""

from __future__ import annotations

from collections.abc import Sequence

from layouts.evidence import cpu_class
from layouts.library import Library
from layouts.shapes import Hardware
from layouts.values import Frozen

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

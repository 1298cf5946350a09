"""The host's processors, memory, GPUs and what joins them, from /proc, /sys and NVML.

Whatever the host, the driver or a device does not tell is None. NVML speaks to the driver alone: no CUDA context is
made, so no GPU memory is taken.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from runtime.nvml_probe import attempt, cuda_version, import_nvml, text
from snapshots.content import Gpu, GpuLink, Hardware

SYS = Path("/sys")
LEVELS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""NVML's nearest common ancestor of two devices to nvidia-smi's name of the path between them."""
MAX_NVLINKS = 36
NVSWITCH = 2
"""NVML_NVLINK_DEVICE_TYPE_SWITCH"""


def read_hardware(nvml: Callable[[], Any] | None = None) -> Hardware:
    """What this host is made of; `nvml` gives the NVML binding, the one of nvidia-ml-py by default."""
    memory = attempt(lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    base = Hardware(
        machine=platform.machine() or None,
        cpu=_cpu_name(),
        cpu_count=os.cpu_count(),
        numa_nodes=_numa_nodes(),
        memory_bytes=memory,
    )
    try:
        with _opened(nvml or import_nvml) as library:
            return base.model_copy(update=_gpu_part(library))
    except ImportError:
        return base.model_copy(update={"gpu_note": "the package nvidia-ml-py is not installed"})
    except Exception as error:
        return base.model_copy(update={"gpu_note": " ".join(str(error).split()) or type(error).__name__})


@contextlib.contextmanager
def _opened(nvml: Callable[[], Any]) -> Iterator[Any]:
    library = nvml()
    library.nvmlInit()
    try:
        yield library
    finally:
        # NVML counts its users: this ends our use of it, not that of a sampler in the same process.
        attempt(library.nvmlShutdown)


def _gpu_part(nvml: Any) -> dict[str, Any]:
    count = nvml.nvmlDeviceGetCount()
    handles = [attempt(partial(nvml.nvmlDeviceGetHandleByIndex, index)) for index in range(count)]
    gpus = tuple(_gpu(nvml, index, handle) for index, handle in enumerate(handles))
    return {
        "driver": attempt(lambda: text(nvml.nvmlSystemGetDriverVersion())),
        "driver_cuda": attempt(lambda: cuda_version(nvml.nvmlSystemGetCudaDriverVersion_v2())),
        "gpus": gpus,
        "gpu_note": None if gpus else "no NVIDIA GPU on this host",
        "links": tuple(_links(nvml, handles, gpus)),
    }


def _gpu(nvml: Any, index: int, handle: Any) -> Gpu:
    if handle is None:
        return Gpu(index=index)

    def ask(name: str) -> Any:
        return attempt(lambda: getattr(nvml, f"nvmlDeviceGet{name}")(handle))

    bus_id = attempt(lambda: text(nvml.nvmlDeviceGetPciInfo(handle).busId))
    capability = ask("CudaComputeCapability")
    return Gpu(
        index=index,
        name=attempt(lambda: text(nvml.nvmlDeviceGetName(handle))),
        uuid=attempt(lambda: text(nvml.nvmlDeviceGetUUID(handle))),
        bus_id=bus_id,
        memory_bytes=attempt(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total)) or None,
        compute_capability=f"{capability[0]}.{capability[1]}" if capability else None,
        pcie_generation_now=ask("CurrPcieLinkGeneration"),
        pcie_generation_possible=ask("MaxPcieLinkGeneration"),
        pcie_width_now=ask("CurrPcieLinkWidth"),
        pcie_width_possible=ask("MaxPcieLinkWidth"),
        numa_node=_numa_node(bus_id),
    )


def _links(nvml: Any, handles: list[Any], gpus: tuple[Gpu, ...]) -> Iterator[GpuLink]:
    """How each pair of GPUs is joined: by NVLinks with their number, else by the nearest common ancestor on PCIe."""
    lanes = [_nvlinks(nvml, handle) for handle in handles]
    for first in range(len(handles)):
        for second in range(first + 1, len(handles)):
            direct = lanes[first].get(_bus(gpus[second].bus_id), 0)
            switched = min(lanes[first].get("switch", 0), lanes[second].get("switch", 0))
            kind = f"NV{direct or switched}" if direct or switched else None
            if kind is None and handles[first] is not None and handles[second] is not None:
                pair = handles[first], handles[second]
                level = attempt(partial(nvml.nvmlDeviceGetTopologyCommonAncestor, *pair))
                kind = LEVELS.get(level) if level is not None else None
            if kind is not None:
                yield GpuLink(first=first, second=second, kind=kind)


def _nvlinks(nvml: Any, handle: Any) -> dict[str, int]:
    """Active NVLinks of one GPU by the bus id at their other end, "switch" for an NVSwitch."""
    found: dict[str, int] = {}
    if handle is None:
        return found
    for link in range(MAX_NVLINKS):
        state = attempt(partial(nvml.nvmlDeviceGetNvLinkState, handle, link))
        if state != 1:
            continue
        kind = attempt(partial(nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link))
        remote = attempt(partial(nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link))
        end = "switch" if kind == NVSWITCH else "" if remote is None else _bus(text(remote.busId))
        found[end] = found.get(end, 0) + 1
    return found


def _bus(bus_id: str | None) -> str:
    """A PCI bus id in one spelling; drivers write the domain with four or eight digits."""
    if bus_id is None:
        return ""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}" if rest and re.fullmatch("[0-9a-f]+", domain) else bus_id.lower()


def _numa_node(bus_id: str | None) -> int | None:
    if bus_id is None:
        return None
    node = attempt(lambda: int((SYS / "bus/pci/devices" / _bus(bus_id) / "numa_node").read_text()))
    return node if node is not None and node >= 0 else None


def _numa_nodes() -> int | None:
    return len(list((SYS / "devices/system/node").glob("node[0-9]*"))) or None


def _cpu_name() -> str | None:
    listing = attempt(lambda: Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")) or ""
    found = re.search(r"^model name\s*:\s*(.+)$", listing, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or None

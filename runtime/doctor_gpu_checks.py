"""Checks of GPUs, driver and CUDA. Without a GPU they have nothing to complain of: a host may decode on its CPU."""

from __future__ import annotations

from runtime.doctor_checks import Finding, Severity
from runtime.host_probe import Gpu, Probe, Toolkit

FLASHINFER_SM120_NVCC = "12.9"
"""FlashInfer's kernels for compute capability 12.0 compile from this nvcc on."""
DRIVER_ERRORS = {
    "LibraryNotFound": ("the driver library (libnvidia-ml) is missing", "install the NVIDIA driver"),
    "DriverNotLoaded": ("the driver is installed but not loaded", "load it: sudo modprobe nvidia"),
    "NoPermission": (
        "no permission to talk to the driver",
        "give this user access to /dev/nvidia*, e.g. by the group video",
    ),
    "silent": (
        "the driver did not answer in time",
        "look for GPU errors (Xid): sudo dmesg | grep -i nvrm; a hung GPU needs a reset or a reboot",
    ),
}


def gpu_driver(probe: Probe) -> Finding:
    """Driver present, loaded, of one version, answering."""
    driver = probe.driver
    expected = "an NVIDIA driver that answers where there is an NVIDIA GPU"

    def finding(severity: Severity, found: str, remedy: str = "") -> Finding:
        return Finding(
            id="gpu-driver",
            found=found,
            expected=expected,
            severity=severity,
            remedy=remedy,
            source="NVML, /proc/driver/nvidia/version, PCI bus",
        )

    if driver.error is None:
        names = ", ".join(sorted({gpu.name for gpu in driver.gpus})) or "no GPU"
        lost = probe.nvidia_devices - len(driver.gpus)
        found = f"driver {driver.version or 'n/a'} (CUDA up to {driver.cuda or 'n/a'}): {len(driver.gpus)} x {names}"
        if driver.gpus and lost > 0:
            return finding(
                "error",
                f"{found}; {lost} more on the PCI bus that the driver does not show",
                "see why: sudo dmesg | grep -i -e nvrm -e xid",
            )
        return finding("ok", found)
    if driver.error == "LibRmVersionMismatch":
        return finding(
            "error",
            f"driver library and loaded kernel module (version {driver.module_version or 'n/a'}) differ",
            "reboot, or stop all GPU programs and reload: sudo rmmod nvidia_uvm nvidia && sudo modprobe nvidia",
        )
    if driver.error == "nvidia-ml-py is not installed":
        return finding("warning", driver.error, "pip install nvidia-ml-py")
    words, remedy = DRIVER_ERRORS.get(
        driver.error,
        (
            driver.error_text or driver.error,
            "see what nvidia-smi says; an older driver than NVML needs an update",
        ),
    )
    has_gpu = probe.nvidia_devices > 0 or driver.module_version is not None
    if not has_gpu and driver.error in ("LibraryNotFound", "DriverNotLoaded"):
        return finding("ok", "no NVIDIA GPU on this host; engines run on the CPU")
    if not has_gpu:
        return finding("warning", words, remedy)
    there = f"{probe.nvidia_devices} NVIDIA GPU(s) on the PCI bus, but " if probe.nvidia_devices else ""
    return finding("error", there + words, remedy)


def gpu_mig(probe: Probe) -> Finding:
    """GPUs divided into MIG instances."""
    divided = [gpu for gpu in probe.driver.gpus if gpu.mig]
    return Finding.judged(
        divided,
        id="gpu-mig",
        found=f"MIG is on: {_indices(divided)}" if divided else _of_gpus(probe, "MIG is off"),
        expected="whole GPUs: instances have no peer-to-peer, no power or utilisation readings, a part of the memory",
        remedy="to use them whole: sudo nvidia-smi -i N -mig 0 (with no program on them)",
        source="NVML nvmlDeviceGetMigMode",
    )


def flashinfer_toolkit(probe: Probe) -> Finding:
    """Which toolkit FlashInfer would compile with, and whether that works on compute capability 12.0."""
    chosen = _chosen(probe)
    sm120 = _sm120(probe)
    others = [each for each in probe.toolkits if each is not chosen]
    beside = "; also here: " + ", ".join(map(_named, others)) if others else ""

    def finding(severity: Severity, found: str, remedy: str = "") -> Finding:
        return Finding(
            id="cuda-toolkit",
            found=found + beside,
            expected=f"nvcc {FLASHINFER_SM120_NVCC} or newer for compute capability 12.0",
            severity=severity,
            remedy=remedy,
            source="nvcc --version; order of FlashInfer: CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda",
        )

    needed = bool(sm120) and "flashinfer-python" in probe.packages.versions
    good = next((each for each in others if _at_least(each.version, FLASHINFER_SM120_NVCC)), None)
    remedy = (
        f"export CUDA_HOME={good.home}"
        if good
        else "install CUDA 12.9 or newer and set CUDA_HOME to its folder"
    )
    if probe.flashinfer_home is None:
        found = "no CUDA toolkit: FlashInfer cannot compile kernels, only use ones that come compiled"
        return finding("error" if needed else "info", found, remedy if sm120 else "")
    if chosen is None or chosen.version is None:
        found = (
            f"FlashInfer would use {probe.flashinfer_home} ({probe.flashinfer_why}), where no nvcc answers"
        )
        misleading = probe.flashinfer_why in ("CUDA_HOME", "CUDA_PATH")
        lasting = good or next((each for each in others if each.version), None)
        way = f"export CUDA_HOME={lasting.home}" if lasting else f"unset {probe.flashinfer_why}"
        severity: Severity = "error" if needed else "warning" if misleading else "info"
        return finding(severity, found, way if misleading else remedy)
    works = _at_least(chosen.version, FLASHINFER_SM120_NVCC)
    verdict = "works" if works else f"does not work (needs {FLASHINFER_SM120_NVCC})"
    override = f"; FLASHINFER_NVCC={probe.flashinfer_nvcc} compiles instead" if probe.flashinfer_nvcc else ""
    found = (
        f"FlashInfer would use CUDA {chosen.version} in {probe.flashinfer_home} (from {probe.flashinfer_why})"
        f"{override}; on compute capability 12.0 that {verdict}"
    )
    if works:
        return finding("ok", found)
    if not sm120:
        return finding("info", found, f"only for compute capability 12.0: {remedy}")
    return finding("error" if needed else "warning", found, remedy)


def torch_build(probe: Probe) -> Finding:
    """torch built for a CUDA that the driver runs."""
    torch, cuda, limit = probe.packages.versions.get("torch"), probe.packages.torch_cuda, probe.driver.cuda
    gpus = probe.driver.gpus
    found = f"torch {torch}, built {f'for CUDA {cuda}' if cuda else 'without CUDA'}" if torch else "no torch"
    severity: Severity = "ok"
    remedy = ""
    if torch is None:
        severity, remedy = (
            "error",
            "reinstall this distribution: pip install --force-reinstall ddtree-console",
        )
    elif gpus and cuda is None:
        severity, remedy = "error", "install the torch built for CUDA: see https://pytorch.org/get-started"
    elif gpus and cuda and limit and _newer(cuda, limit):
        found += f", but the driver runs CUDA {limit} at most"
        # Within one major version an older driver runs newer CUDA (CUDA minor version compatibility).
        severity = "error" if cuda.split(".")[0] != limit.split(".")[0] else "info"
        remedy = f"update the driver, or install torch built for CUDA {limit}" if severity == "error" else ""
    return Finding(
        id="torch-cuda",
        found=found,
        expected="torch built for a CUDA version the driver runs"
        if gpus
        else "any build of torch: there is no GPU",
        severity=severity,
        remedy=remedy,
        source="torch/version.py, NVML nvmlSystemGetCudaDriverVersion",
    )


def attention_sm120(probe: Probe) -> Finding:
    """FlashInfer's attention on compute capability 12.0."""
    flashinfer = probe.packages.versions.get("flashinfer-python")
    affected = _sm120(probe) if flashinfer else []
    return Finding.judged(
        affected,
        id="attention-sm120",
        found=f"FlashInfer {flashinfer} and compute capability 12.x: {_indices(affected)}"
        if affected
        else _of_gpus(probe, "no GPU of compute capability 12.x with FlashInfer"),
        expected="triton attention on compute capability 12.x",
        remedy="SGLang: --attention-backend triton",
        source="NVML, package metadata; operators' reports for RTX PRO 6000 Blackwell",
    )


def shared_memory_sm120(probe: Probe) -> Finding:
    """The smaller shared memory of compute capability 12.0."""
    affected = _sm120(probe)
    return Finding.judged(
        affected,
        id="shared-memory-sm120",
        found=f"100 KB of shared memory per multiprocessor (228 KB on 9.0 and 10.0): {_indices(affected)}"
        if affected
        else _of_gpus(probe, "no GPU of compute capability 12.x"),
        expected="kernels tuned for 100 KB on compute capability 12.x",
        remedy='where a kernel fails with "out of resource: shared memory", lower its tile sizes or stages',
        severity="info",
        source="CUDA C++ Programming Guide, technical specifications per compute capability",
    )


def pcie_link(probe: Probe) -> Finding:
    """Cards that run on fewer lanes than they have."""
    narrow = [
        gpu
        for gpu in probe.driver.gpus
        if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max
    ]
    lanes = ", ".join(f"GPU {gpu.index}: x{gpu.pcie_width} of x{gpu.pcie_width_max}" for gpu in narrow)
    return Finding.judged(
        narrow,
        id="pcie-link",
        found=lanes or _of_gpus(probe, "all links at full width"),
        expected="each card on all its PCIe lanes: transfers between cards take as much longer as lanes are missing",
        remedy="look whether the slot is wired for all lanes, then reseat card or riser",
        source="/sys/bus/pci current_link_width and max_link_width, NVML",
    )


def peer_to_peer(probe: Probe) -> Finding:
    """Pairs of GPUs that can only exchange data through host memory."""
    blocked = probe.driver.blocked_peers
    pairs = ", ".join(f"{one}-{other}" for one, other in blocked[:8]) + (" ..." if len(blocked) > 8 else "")
    several = len(probe.driver.gpus) > 1
    return Finding.judged(
        blocked,
        id="peer-to-peer",
        found=f"no peer-to-peer between GPUs {pairs}"
        if blocked
        else "every pair of GPUs reads each other's memory"
        if several
        else _of_gpus(probe, "one GPU"),
        expected="peer-to-peer between all GPUs of a tensor- or expert-parallel layout",
        remedy="switch IOMMU/ACS off in firmware (or iommu=pt), "
        "check that the driver allows peer-to-peer for this card",
        source="NVML nvmlDeviceGetP2PStatus",
    )


def numa_split(probe: Probe) -> Finding:
    """GPUs on more than one NUMA node."""
    nodes: dict[int, list[Gpu]] = {}
    for gpu in probe.driver.gpus:
        if gpu.numa_node is not None:
            nodes.setdefault(gpu.numa_node, []).append(gpu)
    split = len(nodes) > 1
    where = "; ".join(f"node {node}: {_indices(gpus)}" for node, gpus in sorted(nodes.items()))
    return Finding.judged(
        split,
        id="numa",
        found=where if split else _of_gpus(probe, f"all GPUs on one NUMA node of {max(probe.numa_nodes, 1)}"),
        expected="ranks of a small layout on one NUMA node, each process bound to the node of its GPU",
        remedy="for a layout of few GPUs choose those of one node (CUDA_VISIBLE_DEVICES); SGLang: --numa-node",
        severity="info",
        source="/sys/bus/pci numa_node",
    )


def throttling(probe: Probe) -> Finding:
    """Clocks held down at this moment."""
    slowed = [gpu for gpu in probe.driver.gpus if gpu.throttle]
    hard = any(reason != "power cap" for gpu in slowed for reason in gpu.throttle)
    return Finding(
        id="throttling",
        found="; ".join(f"GPU {gpu.index}: {', '.join(gpu.throttle)}" for gpu in slowed)
        or _of_gpus(probe, "no clock is held down now"),
        expected="clocks not limited by heat or power",
        severity="warning" if hard else "info" if slowed else "ok",
        remedy="check fans, air flow and power supply; the cap: nvidia-smi -q -d POWER,PERFORMANCE"
        if slowed
        else "",
        source="NVML clock-throttle reasons, at the moment of the check",
    )


def _chosen(probe: Probe) -> Toolkit | None:
    return next((each for each in probe.toolkits if probe.flashinfer_home in each.homes), None)


def _named(toolkit: Toolkit) -> str:
    return f"{toolkit.version or 'no version'} in {toolkit.home} ({', '.join(toolkit.named_by)})"


def _sm120(probe: Probe) -> list[Gpu]:
    return [gpu for gpu in probe.driver.gpus if (gpu.compute_capability or "").startswith("12.")]


def _indices(gpus: list[Gpu]) -> str:
    return "GPU " + ", ".join(str(gpu.index) for gpu in gpus)


def _of_gpus(probe: Probe, found: str) -> str:
    return found if probe.driver.gpus else "no GPU"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())


def _newer(version: str, than: str) -> bool:
    return _numbers(version) > _numbers(than)


def _at_least(version: str | None, least: str) -> bool:
    return version is not None and _numbers(version) >= _numbers(least)

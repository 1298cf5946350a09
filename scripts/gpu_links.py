"""What joins two GPUs: topology, copies, collectives by size, as figures for a layout's hardware profile.

Each sample of a collective is several of them one after the other, so that a rank which comes late costs little. Times
are the device's own where there is one. `graph`: the same calls captured once and replayed, as in a decoding step.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

KIB, MIB = 1 << 10, 1 << 20
SIZES = tuple(8 * KIB << i for i in range(14))
"""8 KiB to 64 MiB."""
GRAPHED = 256 * KIB
SAMPLES = 20
CALLS = 10
PRELOAD = "import runtime.gang_rank, torch; print(torch.cuda.is_initialized())"
Tell = Callable[..., None]


def run_links(device: str, most: int, tell: Tell) -> None:
    """Measures everything; `most`: the largest message, bytes. `tell(**fields)` takes each finding."""
    preload = subprocess.Popen([sys.executable, "-c", PRELOAD], stdout=subprocess.PIPE, text=True)
    link = topology(device)
    tell(kind="topology", **link)
    if device == "cuda":
        for finding in copies(1024 * MIB):
            tell(kind="copy", **finding)
    found = two_ranks(device, tuple(size for size in SIZES if size <= most), tell)
    tell(kind="profile", interconnect=link["interconnect"], **profile(found))
    said = preload.communicate(timeout=120)[0].strip()
    tell(kind="preload", cuda_initialised=said, wanted="False")


def topology(device: str) -> dict[str, Any]:
    """How the first two GPUs are joined, as the driver says."""
    if device != "cuda":
        return {"interconnect": "gloo", "links": 0}
    import torch

    found: dict[str, Any] = {
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "peer_access": [torch.cuda.can_device_access_peer(a, b) for a, b in ((0, 1), (1, 0))],
    }
    active = None
    try:
        import pynvml

        pynvml.nvmlInit()
        first, second = (pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(2))
        active = sum(_link_up(pynvml, first, link) for link in range(18))
        found["p2p_nvlink"] = int(
            pynvml.nvmlDeviceGetP2PStatus(first, second, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
        )
        found["driver"] = str(pynvml.nvmlSystemGetDriverVersion())
    except Exception as error:  # what is known otherwise stands; the reason is told
        found["nvml"] = f"{type(error).__name__}: {error}"
    shown = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False).stdout
    row = next((line.split() for line in shown.splitlines() if line.startswith("GPU0")), [])
    found["topo"] = row[2] if len(row) > 2 else "n/a"
    found["links"] = active
    linked = found["topo"].startswith("NV") or bool(active)
    found["interconnect"] = "NVLink" if linked else "PCIe"
    return found


def _link_up(nvml: Any, handle: Any, link: int) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetNvLinkState(handle, link))
    except nvml.NVMLError:
        return False


def copies(size: int) -> list[dict[str, Any]]:
    """Bandwidth of copies of `size` bytes between the GPUs: each way alone, and both at once."""
    import torch

    there = [torch.empty(size, dtype=torch.uint8, device=f"cuda:{i}") for i in range(2)]
    back = [torch.empty_like(each) for each in there]
    streams = [torch.cuda.Stream(device=i) for i in range(2)]

    def seconds(ways: Sequence[tuple[int, int]]) -> float:
        for i in range(2):
            torch.cuda.synchronize(i)
        began = time.perf_counter()
        for source, target in ways:
            with torch.cuda.stream(streams[source]):
                back[target].copy_(there[source], non_blocking=True)
        for i in range(2):
            torch.cuda.synchronize(i)
        return time.perf_counter() - began

    found = []
    for name, ways in (("0 -> 1", [(0, 1)]), ("1 -> 0", [(1, 0)]), ("both", [(0, 1), (1, 0)])):
        seconds(ways)
        times = [seconds(ways) for _ in range(SAMPLES)]
        rate = len(ways) * size / statistics.median(times) / 1e9
        found.append({"ways": name, "bytes": size, "gb_s": round(rate, 1), "n": SAMPLES})
    return found


def two_ranks(device: str, sizes: Sequence[int], tell: Tell) -> list[dict[str, Any]]:
    """Runs `_rank` in two processes of their own; what rank 0 found, told as it comes."""
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipe, theirs = context.Pipe(duplex=False)
        ranks = [
            context.Process(target=_rank, args=(rank, device, folder, tuple(sizes), theirs), daemon=True)
            for rank in range(2)
        ]
        for each in ranks:
            each.start()
        found: list[dict[str, Any]] = []
        try:
            while (finding := _next(pipe, ranks)) is not None:
                found.append(finding)
                tell(**finding)
            for each in ranks:
                each.join(20)
        finally:
            for each in ranks:
                each.kill()
        return found


def _next(pipe: Any, ranks: Sequence[Any]) -> dict[str, Any] | None:
    """The next finding, None at the end; raises RuntimeError where a rank ended or nothing came for long."""
    deadline = time.monotonic() + 120
    while not pipe.poll(0.2):
        failed = [each for each in ranks if each.exitcode not in (None, 0)]
        if failed or time.monotonic() > deadline:
            raise RuntimeError(f"a rank ended with {failed[0].exitcode}" if failed else "no answer for 120 s")
    finding: dict[str, Any] | None = pipe.recv()
    return finding


def _rank(rank: int, device: str, folder: str, sizes: Sequence[int], pipe: Any) -> None:
    os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    here = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(here)
    backend = "nccl" if device == "cuda" else "gloo"
    began = time.perf_counter()
    where = {"device_id": here} if device == "cuda" else {}
    dist.init_process_group(
        backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2, **where
    )
    dist.all_reduce(torch.ones(1, device=here))
    _wait(here)
    if rank == 0:
        version = ".".join(map(str, torch.cuda.nccl.version())) if device == "cuda" else "gloo"
        pipe.send({"kind": "join", "s": round(time.perf_counter() - began, 2), "nccl": version})
    for size in sizes:
        value = torch.zeros(size // 2, dtype=torch.bfloat16, device=here)

        def reduce(value: Any = value) -> None:
            dist.all_reduce(value)

        def hop(value: Any = value) -> None:
            if rank == 0:
                dist.send(value, 1)
                dist.recv(value, 1)
            else:
                dist.recv(value, 0)
                dist.send(value, 0)

        for name, call, halves in (("all-reduce", reduce, 1), ("send and recv", hop, 2)):
            found = _timed(call, here, CALLS if size <= MIB else 2)
            if rank == 0:
                pipe.send(_finding(name, size, found, halves, False))
        if device == "cuda" and size <= GRAPHED:
            found = _timed(_captured(reduce, here), here, 1)
            if rank == 0:
                pipe.send(_finding("all-reduce", size, found, CALLS, True))
    if rank == 0:
        pipe.send(None)
    dist.barrier()
    dist.destroy_process_group()


def _captured(call: Callable[[], None], here: Any) -> Callable[[], None]:
    """`CALLS` calls as one graph."""
    import torch

    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(here)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            call()
    return graph.replay  # type: ignore[no-any-return]


def _timed(call: Callable[[], None], here: Any, calls: int) -> list[float]:
    """Seconds of one call, `SAMPLES` times, each over `calls` of them."""
    import torch
    import torch.distributed as dist

    for _ in range(3):
        call()
    times = []
    for _ in range(SAMPLES):
        dist.barrier()
        _wait(here)
        if here.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(1_000_000)  # the host runs ahead meanwhile, so that its launches do not count
            start.record()
            for _ in range(calls):
                call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3 / calls)
        else:
            began = time.perf_counter()
            for _ in range(calls):
                call()
            times.append((time.perf_counter() - began) / calls)
    return times


def _wait(here: Any) -> None:
    import torch

    if here.type == "cuda":
        torch.cuda.synchronize(here)


def _finding(name: str, size: int, times: Sequence[float], share: int, graph: bool) -> dict[str, Any]:
    """Microseconds of a `share`-th of what was timed."""
    us = sorted(each / share * 1e6 for each in times)
    middle = statistics.median(us)
    return {
        "kind": name, "bytes": size, "graph": graph, "us": round(middle, 2), "us_low": round(us[0], 2),
        "us_high": round(us[-1], 2), "gb_s": round(size / middle / 1e3, 2), "n": len(us),
    }  # fmt: skip


def profile(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Latency and bandwidth of a collective, as latency + bytes / bandwidth: two ranks behind a switch sum in one step.

    Bandwidth from the largest message, latency from the smallest, replayed in a graph where there is such a time:
    launched one by one, small ones take what the host takes.
    """
    reduced = [each for each in found if each["kind"] == "all-reduce"]
    largest = max(reduced, key=lambda each: each["bytes"])
    smallest = min(reduced, key=lambda each: (each["bytes"], not each["graph"]))
    bytes_a_us = largest["bytes"] / largest["us"]
    latency = max(smallest["us"] - smallest["bytes"] / bytes_a_us, 0.1)
    return {"link_latency_us": round(latency, 2), "link_gb_s": round(bytes_a_us / 1e3, 1)}

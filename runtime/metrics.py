"""Prometheus metrics of one runtime, fed from its `watch` stream and, at each scrape, from its status.

Names carry base units; sets of labels are small and bounded. What is not known has no sample, never 0. The client
library is imported late and only with a registry of our own: an engine that uses it too sets variables first.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from runtime.interface import (
    STAGES,
    Description,
    EngineState,
    GpuSample,
    HostSample,
    RequestStats,
    RoundStats,
    Runtime,
    RuntimeFault,
    Status,
    WatchEvent,
)

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

LOGGER = logging.getLogger("ddtree")
WATCH_AGAIN_S = 1.0
KNOWN_WORKLOADS = 16
"""Workloads told apart by label; those named after the first so many count as "other"."""
GREEDY_BELOW = 1e-4

QUEUE_SECONDS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TTFT_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TPOT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
REQUEST_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
ACCEPT_LENGTHS = tuple(range(1, 17))
GPU_LABELS = ["gpu", "uuid", "name"]


class Metrics:
    """Counters and histograms of what happened, gauges of what is."""

    def __init__(self, runtime: Runtime) -> None:
        from prometheus_client import CollectorRegistry, Counter, Histogram

        self._runtime = runtime
        self._last_round: int | None = None
        self._workloads: set[str] = set()
        self.registry = CollectorRegistry()
        self._gauges = _Gauges()
        self.registry.register(self._gauges)

        def counter(name: str, words: str, *labels: str) -> Counter:
            return Counter(f"ddtree_{name}", words, labels, registry=self.registry)

        def histogram(name: str, words: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"ddtree_{name}", words, labels, buckets=buckets, registry=self.registry)

        self._requests = counter("requests", "Requests that ended, by reason.", "finish_reason")
        self._http = counter(
            "http_requests", "HTTP requests answered, by route and status.", "route", "status"
        )
        self._prompt = counter("prompt_tokens", "Prompt tokens of requests that ended, once prefilled.")
        self._cached = counter("cached_prompt_tokens", "Prompt tokens of those that a kept prefix gave.")
        self._prefill = counter("prefill_tokens", "Prompt tokens computed in prefill.")
        self._decode = counter(
            "decode_tokens", "Output tokens that decode rounds gave; the prefill gives the first."
        )
        self._output = counter(
            "output_tokens", "Output tokens of requests that ended, the first one included."
        )
        self._rounds = counter("rounds", "Decode rounds, each over one batch.")
        self._sequence_rounds = counter("sequence_rounds", "Decode rounds counted once for each sequence.")
        self._draft = counter("draft_tokens", "Tokens drafted and verified, roots left out.")
        self._stages = counter("round_stage_seconds", "Time in each stage of decode rounds.", "stage")
        self._missed = counter("missed_rounds", "Decode rounds that these figures left out for want of time.")
        self._queue = histogram("queue_seconds", "Submission to start.", QUEUE_SECONDS)
        self._ttft = histogram("time_to_first_token_seconds", "Submission to first token.", TTFT_SECONDS)
        self._tpot = histogram(
            "time_per_output_token_seconds", "Mean time per token after the first, by request.", TPOT_SECONDS
        )
        self._duration = histogram("request_seconds", "Submission to last token.", REQUEST_SECONDS)
        self._accept = histogram(
            "accept_length",
            "Tokens per sequence and decode round, bonus token included, counted when the request ends. "
            "Temperature: greedy, low (to 0.5), medium (to 1), high.",
            ACCEPT_LENGTHS,
            "workload",
            "temperature",
        )

    async def run(self) -> None:
        """Reads the runtime's events until cancelled."""
        while True:
            try:
                async for event in self._runtime.watch():
                    self.take(event)
            except RuntimeFault:
                pass
            except Exception:  # figures go on once the runtime does
                LOGGER.exception("watching the runtime for metrics failed")
            await asyncio.sleep(WATCH_AGAIN_S)

    def take(self, event: WatchEvent) -> None:
        """Counts one event."""
        match event:
            case RoundStats():
                self._take_round(event)
            case RequestStats(state="finished"):
                self._take_request(event)
            case HostSample():
                self._gauges.host = event

    def http_request(self, route: str, status: int, _seconds: float) -> None:
        """Counts one answered HTTP request."""
        self._http.labels(route, str(status)).inc()

    async def render(self, accept: str = "") -> tuple[bytes, str]:
        """The exposition in the format that an Accept header asks for, and its content type."""
        from prometheus_client.exposition import choose_encoder

        self._gauges.status = self._gauges.description = None
        try:
            self._gauges.status = await self._runtime.status()
            self._gauges.description = await self._runtime.describe()
        except RuntimeFault as fault:
            LOGGER.warning("metrics without the runtime's status: %s", fault)
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def _take_round(self, stats: RoundStats) -> None:
        if self._last_round is not None and stats.index > self._last_round + 1:
            self._missed.inc(stats.index - self._last_round - 1)
        self._last_round = stats.index
        self._rounds.inc()
        self._sequence_rounds.inc(stats.batch)
        self._decode.inc(stats.emitted)
        self._draft.inc(max(stats.nodes - stats.batch, 0))
        for stage, seconds in zip(STAGES, stats.stage_s or (), strict=stats.stage_s is not None):
            self._stages.labels(stage).inc(seconds)

    def _take_request(self, stats: RequestStats) -> None:
        self._requests.labels(stats.finish_reason or "none").inc()
        self._output.inc(stats.output_tokens)
        if stats.queue_s is not None:
            self._queue.observe(stats.queue_s)
        if stats.ttft_s is not None:
            self._prompt.inc(stats.prompt_tokens)
            self._cached.inc(stats.cached_tokens)
            self._prefill.inc(stats.prompt_tokens - stats.cached_tokens)
            self._ttft.observe(stats.ttft_s)
            self._duration.observe(stats.ttft_s + (stats.decode_s or 0.0))
        if stats.decode_s is not None and stats.output_tokens > 1:
            self._tpot.observe(stats.decode_s / (stats.output_tokens - 1))
        accept = self._accept.labels(self._workload(stats.workload), temperature_class(stats.temperature))
        for length, rounds in enumerate(stats.accept_counts):
            for _ in range(rounds):
                accept.observe(length)

    def _workload(self, name: str | None) -> str:
        """The label of a workload as a client names it: the first few by name, so that clients cannot add more."""
        if name is None:
            return "none"
        if len(self._workloads) < KNOWN_WORKLOADS and re.fullmatch(r"[A-Za-z0-9_.-]{1,32}", name):
            self._workloads.add(name)
        return name if name in self._workloads else "other"


def temperature_class(temperature: float) -> str:
    """One of four classes; below 1e-4 the choice is greedy."""
    if temperature < GREEDY_BELOW:
        return "greedy"
    return "low" if temperature <= 0.5 else "medium" if temperature <= 1.0 else "high"


class _Gauges:
    """A collector of what is known at the moment of a scrape."""

    def __init__(self) -> None:
        self.status: Status | None = None
        self.description: Description | None = None
        self.host: HostSample | None = None

    def collect(self) -> Iterator[Metric]:
        if self.status is not None:
            yield from _status_metrics(self.status)
        if self.description is not None:
            yield from _description_metrics(self.description)
        if self.host is not None:
            yield from _host_metrics(self.host)
            yield from _gpu_metrics(self.host)


def _gauge(name: str, words: str, value: float | None, **labels: str) -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily

    if value is not None:
        family = GaugeMetricFamily(f"ddtree_{name}", words, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        yield family


def _states(name: str, words: str, known: tuple[str, ...], current: str) -> Iterator[Metric]:
    """One sample for each known state: 1 for the current one, 0 for the others."""
    from prometheus_client.core import StateSetMetricFamily

    family = StateSetMetricFamily(f"ddtree_{name}", words)
    family.add_metric([], {each: each == current for each in known})
    yield family


def _status_metrics(status: Status) -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily

    yield from _gauge("requests_running", "Requests being decoded or prefilled.", status.running)
    yield from _gauge("requests_waiting", "Requests in the queue.", status.waiting)
    slots = GaugeMetricFamily("ddtree_kv_slots", "Token slots of the KV cache, by use.", labels=["use"])
    free = status.slots_total - status.slots_used - status.slots_cached
    for use, count in (("running", status.slots_used), ("cached", status.slots_cached), ("free", free)):
        slots.add_metric([use], count)
    if status.slots_total:
        yield slots
    yield from _states("engine_state", "State of the engine.", tuple(EngineState), status.state)
    yield from _states(
        "mode", "Configured speculation mode.", ("off", "chain", "tree", "auto"), status.config["mode"]
    )
    yield from _gauge(
        "tree_budget_nodes", "Most draft nodes in a tree, root excluded.", status.config.get("tree_budget")
    )
    yield from _baseline_metrics(status)
    yield from _gauge("config_revision", "Revision of the configuration.", status.revision)
    yield from _gauge("start_time_seconds", "Unix time at which the runtime was made.", status.started_at_s)
    yield from _gauge("load_ratio", "Share of loading that is done, while loading.", status.load_progress)


def _baseline_metrics(status: Status) -> Iterator[Metric]:
    """Plain and chain decoding as last measured, and when."""
    from prometheus_client.core import GaugeMetricFamily

    speed = GaugeMetricFamily(
        "ddtree_baseline_tokens_per_second",
        "Decoding of one request as last measured in an idle moment.",
        labels=["mode"],
    )
    moment = GaugeMetricFamily(
        "ddtree_baseline_measured_timestamp_seconds", "Unix time of that measurement.", labels=["mode"]
    )
    for each in status.baselines:
        speed.add_metric([each.mode], each.tok_s)
        moment.add_metric([each.mode], each.measured_at_s)
    if speed.samples:
        yield from (speed, moment)


def _description_metrics(what: Description) -> Iterator[Metric]:
    from prometheus_client.core import InfoMetricFamily

    known: dict[str, Any] = {
        "engine": what.engine,
        "target": what.target,
        "drafter": what.drafter,
        "device": what.device,
        "dtype": what.dtype,
        "speculation": what.speculation.partition(":")[0],
    }
    yield InfoMetricFamily(
        "ddtree_runtime", "What runs.", {name: str(value) for name, value in known.items() if value}
    )


def _host_metrics(host: HostSample) -> Iterator[Metric]:
    yield from _gauge("host_cpu_ratio", "Busy share over all cores.", host.cpu)
    yield from _gauge("host_memory_used_bytes", "Memory in use on the host.", host.memory_used)
    yield from _gauge("host_memory_bytes", "Memory of the host.", host.memory_total)
    yield from _gauge("process_resident_memory_bytes", "Resident memory of the process.", host.process_memory)


def _gpu_metrics(host: HostSample) -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily

    figures = {
        "gpu_utilisation_ratio": ("Share of the last period in which a kernel ran.", "utilisation"),
        "gpu_memory_used_bytes": ("GPU memory in use.", "memory_used"),
        "gpu_memory_bytes": ("GPU memory.", "memory_total"),
        "gpu_power_watts": ("Power drawn.", "power_w"),
        "gpu_power_limit_watts": ("Power limit.", "power_limit_w"),
        "gpu_temperature_celsius": ("Temperature.", "temperature_c"),
        "gpu_sm_clock_hertz": ("Clock of the multiprocessors.", "sm_clock_mhz"),
        "gpu_memory_clock_hertz": ("Clock of the memory.", "memory_clock_mhz"),
        "gpu_pcie_receive_bytes_per_second": ("Into the GPU over PCIe, in a window of 20 ms.", "pcie_rx_b_s"),
        "gpu_pcie_transmit_bytes_per_second": (
            "Out of the GPU over PCIe, in a window of 20 ms.",
            "pcie_tx_b_s",
        ),
        "gpu_nvlink_receive_bytes_per_second": ("Payload into the GPU over all NVLinks.", "nvlink_rx_b_s"),
        "gpu_nvlink_transmit_bytes_per_second": ("Payload out of the GPU over all NVLinks.", "nvlink_tx_b_s"),
    }
    for name, (words, field) in figures.items():
        family = GaugeMetricFamily(f"ddtree_{name}", words, labels=GPU_LABELS)
        scale = 1e6 if field.endswith("_mhz") else 1.0
        for gpu in host.gpus:
            value = getattr(gpu, field)
            if value is not None:
                family.add_metric(_gpu_labels(gpu), value * scale)
        if family.samples:
            yield family
    yield from _gpu_states(host)


def _gpu_states(host: HostSample) -> Iterator[Metric]:
    """Whether each GPU answers, what holds its clocks down, who holds its memory, and how old the readings are."""
    from prometheus_client.core import GaugeMetricFamily

    up = GaugeMetricFamily("ddtree_gpu_up", "1 where the GPU answers, 0 where it is lost.", labels=GPU_LABELS)
    throttled = GaugeMetricFamily(
        "ddtree_gpu_throttled", "1 for each reason that holds clocks down.", labels=[*GPU_LABELS, "reason"]
    )
    processes = GaugeMetricFamily(
        "ddtree_gpu_process_memory_bytes",
        "GPU memory of processes: the runtime's own (ours) and those of others.",
        labels=[*GPU_LABELS, "owner"],
    )
    age = GaugeMetricFamily(
        "ddtree_gpu_reading_age_seconds", "Age of the oldest reading of the GPU.", labels=GPU_LABELS
    )
    for gpu in host.gpus:
        labels = _gpu_labels(gpu)
        up.add_metric(labels, not gpu.state.startswith("lost"))
        for reason in gpu.throttle or ():
            throttled.add_metric([*labels, reason], 1)
        for owner in ("ours", "others"):
            held = [each.memory_used for each in gpu.processes or () if each.ours == (owner == "ours")]
            known = [each for each in held if each is not None]
            if known:
                processes.add_metric([*labels, owner], sum(known))
        if gpu.ages:
            age.add_metric(labels, max(gpu.ages.values()))
    yield from (family for family in (up, throttled, processes, age) if family.samples)


def _gpu_labels(gpu: GpuSample) -> list[str]:
    index = str(gpu.index) if gpu.instance is None else f"{gpu.index}/{gpu.instance}"
    return [index, gpu.uuid or "", gpu.name]


def metrics_router(metrics: Metrics) -> APIRouter:
    """`GET /metrics`; who includes it decides which key it needs."""
    router = APIRouter()

    @router.get(
        "/metrics",
        tags=["health"],
        summary="Prometheus metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {}}}},
    )
    async def scrape(request: Request) -> Response:
        body, content_type = await metrics.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    return router

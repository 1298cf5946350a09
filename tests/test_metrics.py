"""Prometheus metrics: what they count, how they are named, and that the client library's own parser takes them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fake_runtime import FakeRuntime
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from test_runtime_contract import ask, collect, settle
from tiny_models import tiny_config

from runtime.interface import (
    GenerateRequest,
    GpuProcess,
    GpuSample,
    HostSample,
    RequestStats,
    RoundStats,
    Runtime,
    SamplingParams,
)
from runtime.local import LocalRuntime
from runtime.metrics import KNOWN_WORKLOADS, Metrics
from runtime.serve import Throughput

UNITS = (
    "_seconds",
    "_bytes",
    "_ratio",
    "_tokens",
    "_watts",
    "_celsius",
    "_hertz",
    "_nodes",
    "_info",
    "_per_second",
)


@asynccontextmanager
async def counting(runtime: Runtime) -> AsyncIterator[Metrics]:
    """Metrics that read the runtime's events."""
    metrics = Metrics(runtime)
    task = asyncio.create_task(metrics.run())
    await asyncio.sleep(0.05)
    yield metrics
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def samples(metrics: Metrics) -> dict[str, float]:
    """Every sample of the exposition, by its name with its labels."""
    body, _ = await metrics.render()
    return {
        sample.name + "".join(f"[{value}]" for _, value in sorted(sample.labels.items())): sample.value
        for family in parse_text(body.decode())
        for sample in family.samples
    }


def round_of(*emitted: int, index: int = 0, time_s: float = 0.0) -> RoundStats:
    return RoundStats(
        index=index,
        time_s=time_s,
        mode="tree",
        tree_budget=8,
        batch=len(emitted),
        nodes=9 * len(emitted),
        emitted=sum(emitted),
        accept_lengths=emitted,
        draft_depths=tuple(7 for _ in emitted),
        stage_s=(0.1, 0.0, 0.2, 0.0, 0.0),
        slots_used=0,
        slots_total=64,
    )


async def test_the_figures_of_a_real_runtime_add_up(tiny_folder: Path) -> None:
    runtime = LocalRuntime(tiny_config(tiny_folder / "target", tiny_folder / "drafter"))
    await runtime.wait_ready()
    await settle(lambda: bool(runtime._baselines))
    async with counting(runtime) as metrics:
        request = GenerateRequest(
            prompt="abc",
            workload="chat",
            sampling=SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.7),
        )
        finished = (await collect(runtime, request))[-1]
        await settle(
            lambda: metrics.registry.get_sample_value("ddtree_rounds_total") == finished.stats.rounds
        )
        found = await samples(metrics)
    stats = finished.stats
    assert found["ddtree_requests_total[length]"] == 1
    assert found["ddtree_decode_tokens_total"] == 19, (
        "tokens, however many a round gave; prefill gave the first"
    )
    assert found["ddtree_prefill_tokens_total"] == stats.prompt_tokens - stats.cached_tokens
    assert found["ddtree_rounds_total"] == stats.rounds == sum(stats.accept_counts)
    assert found["ddtree_accept_length_count[medium][chat]"] == stats.rounds
    assert found["ddtree_accept_length_sum[medium][chat]"] == 19
    assert stats.accept_length == pytest.approx(19 / stats.rounds)
    assert found["ddtree_time_to_first_token_seconds_count"] == found["ddtree_queue_seconds_count"] == 1
    assert found["ddtree_time_per_output_token_seconds_sum"] == pytest.approx(stats.decode_s / 19)
    slots = [found[f"ddtree_kv_slots[{use}]"] for use in ("running", "cached", "free")]
    assert sum(slots) == (await runtime.status()).slots_total
    assert found["ddtree_engine_state[ready]"] == found["ddtree_mode[tree]"] == 1
    assert found["ddtree_baseline_tokens_per_second[off]"] > 0
    assert found["ddtree_baseline_tokens_per_second[chain]"] > 0
    await runtime.aclose()


@pytest.mark.case("A30")
async def test_throughput_counts_tokens_and_no_idle_time() -> None:
    metrics, throughput = Metrics(FakeRuntime()), Throughput()
    rates = []
    for start in (100.0, 112.0):
        for chunk in range(21):
            stats = round_of(4, index=chunk, time_s=start + chunk / 10)
            metrics.take(stats)
            throughput.add(stats)
            rates.append(throughput.tok_s(stats.time_s))
        known = [rate for rate in rates if rate is not None]
        assert known == [pytest.approx(40.0)] * len(known)
        assert throughput.tok_s(start + 7.0) is None, "idle, not the last value"
    found = await samples(metrics)
    assert found["ddtree_decode_tokens_total"] == 2 * 21 * 4
    assert found["ddtree_round_stage_seconds_total[verify]"] == pytest.approx(42 * 0.2)
    assert found["ddtree_draft_tokens_total"] == 42 * 8


async def test_both_formats_parse_and_names_follow_the_conventions() -> None:
    runtime = FakeRuntime()
    async with counting(runtime) as metrics:
        await collect(runtime, ask())
        gpu = GpuSample(
            index=0,
            name='H200 "a\\b"\n',
            uuid="GPU-1",
            memory_used=7,
            utilisation=0.5,
            power_w=300.0,
            sm_clock_mhz=1980,
            memory_clock_mhz=3201,
            pcie_rx_b_s=1e9,
            pcie_tx_b_s=2e9,
            nvlink_rx_b_s=3e9,
            nvlink_tx_b_s=4e9,
            throttle=("power cap",),
            processes=(GpuProcess(pid=1, memory_used=5, ours=True), GpuProcess(pid=2, memory_used=2)),
            ages={"power_w": 0.5, "utilisation": 1.5},
        )
        lost = GpuSample(index=1, name="other", state="lost, last reading 09:12:13")
        metrics.take(HostSample(host="h", time_s=1.0, cpu=0.2, gpus=(gpu, lost)))
        metrics.http_request("/v1/models", 200, 0.1)
        text, plain_type = await metrics.render("text/plain")
        openmetrics, open_type = await metrics.render("application/openmetrics-text; version=1.0.0")
    assert plain_type.startswith("text/plain") and open_type.startswith("application/openmetrics-text")
    families = list(parse_text(text.decode()))
    assert "ddtree_accept_length" in {each.name for each in parse_openmetrics(openmetrics.decode())}
    for family in families:
        assert re.fullmatch(r"ddtree_[a-z0-9_]+", family.name)
        assert family.documentation or family.name.endswith("_created")
        measured = re.search(
            r"time|memory|power|temperature|cpu|utilisation|clock|pcie|nvlink|age", family.name
        )
        assert not measured or family.name.removesuffix("_created").endswith(UNITS), family.name
    gpus = {
        (sample.name, sample.labels["gpu"]): sample.value
        for family in families
        for sample in family.samples
        if "gpu" in sample.labels
    }
    assert gpus["ddtree_gpu_memory_used_bytes", "0"] == 7
    known = {name: value for (name, index), value in gpus.items() if index == "0"}
    assert known["ddtree_gpu_sm_clock_hertz"] == 1.98e9
    assert known["ddtree_gpu_memory_clock_hertz"] == 3.201e9
    assert known["ddtree_gpu_pcie_receive_bytes_per_second"] == 1e9
    assert known["ddtree_gpu_nvlink_transmit_bytes_per_second"] == 4e9
    assert known["ddtree_gpu_throttled"] == known["ddtree_gpu_up"] == 1
    assert known["ddtree_gpu_reading_age_seconds"] == 1.5
    assert {key: value for key, value in gpus.items() if key[1] == "1"} == {("ddtree_gpu_up", "1"): 0}, (
        "what is not known has no sample"
    )


async def test_labels_stay_few_whatever_clients_send() -> None:
    metrics = Metrics(FakeRuntime())
    for number in range(5 * KNOWN_WORKLOADS):
        for name in (f"w{number}", "x" * 33, "\n{}", None):
            metrics.take(finished(workload=name, accept_counts=(0, 1)))
    found = await samples(metrics)
    counts = {key: value for key, value in found.items() if key.startswith("ddtree_accept_length_count")}
    assert len(counts) == KNOWN_WORKLOADS + 2
    assert counts["ddtree_accept_length_count[greedy][none]"] == 5 * KNOWN_WORKLOADS
    assert sum(counts.values()) == 4 * 5 * KNOWN_WORKLOADS


async def test_rounds_that_were_not_seen_are_owned_up_to() -> None:
    metrics = Metrics(FakeRuntime())
    for index in (5, 6, 9):
        metrics.take(round_of(1, index=index))
    found = await samples(metrics)
    assert found["ddtree_rounds_total"] == 3 and found["ddtree_missed_rounds_total"] == 2


async def test_a_request_without_a_token_adds_no_times() -> None:
    metrics = Metrics(FakeRuntime())
    metrics.take(finished(finish_reason="cancelled", output_tokens=0))
    found = await samples(metrics)
    assert found["ddtree_requests_total[cancelled]"] == 1
    assert found["ddtree_time_to_first_token_seconds_count"] == 0
    assert found["ddtree_prefill_tokens_total"] == 0


async def test_a_loading_runtime_is_scraped_too() -> None:
    found = await samples(Metrics(FakeRuntime(loading=True)))
    assert found["ddtree_engine_state[loading]"] == 1
    assert found["ddtree_load_ratio"] == pytest.approx(0.4)


def finished(**changes: object) -> RequestStats:
    fields: dict[str, object] = {
        "request_id": "r1",
        "finish_reason": "stop",
        "mode": "tree",
        "tree_budget": 8,
        "temperature": 0.0,
        "prompt_tokens": 4,
        "cached_tokens": 0,
        "output_tokens": 2,
        "rounds": 1,
        "num_correct_drafts": 0,
        "accept_length": 1.0,
    }
    return RequestStats(**(fields | changes))

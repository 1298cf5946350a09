"""`ddtree serve` from start to end: real child processes over tiny models, a real notification socket."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import ROOT, Manager, Served, serving, until
from test_runtime_contract import ask, collect, settle
from tiny_models import tiny_config

from runtime.config import RuntimeConfig, validate
from runtime.connect import open_runtime
from runtime.interface import (
    ConfigRejected,
    EngineState,
    GenerateEvent,
    GenerateRequest,
    RuntimeBusy,
    RuntimeUnavailable,
    TokensEmitted,
)
from runtime.last_good import keep, last_good_file, recall
from runtime.listener import Listener, ServerSettings
from runtime.local import LocalRuntime
from runtime.sd_notify import Notifier
from runtime.serve import Orders, attend, come_up, keep_once_proved, reload

LONG = {"prompt": "abc", "max_tokens": 800, "ignore_eos": True, "temperature": 0, "ddtree": {"mode": "off"}}


@pytest.fixture
def models(tiny_folder: Path) -> tuple[str, ...]:
    return ("--model", str(tiny_folder / "target"), "--drafter", str(tiny_folder / "drafter"))


@pytest.fixture(params=["abstract", "path"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    name = f"@ddtree-test-{os.getpid()}" if request.param == "abstract" else str(tmp_path / "notify")
    made = Manager(name)
    yield made
    made.close()


# Whole lives


def test_a_life_under_a_service_manager(tmp_path: Path, models: tuple[str, ...]) -> None:
    manager = Manager(f"@ddtree-life-{os.getpid()}")
    with serving(tmp_path, *models, NOTIFY_SOCKET=manager.name, WATCHDOG_USEC="4000000") as served:
        assert served.get("/health").status_code == 200
        assert not any("READY" in each for each in manager.heard())
        served.wait_ready()
        until(lambda: any("READY" in each for each in manager.heard()), served)
        ready = next(each for each in manager.heard() if "READY" in each)
        assert ready["STATUS"].startswith("ready: tree")
        before = manager.messages[: manager.messages.index(ready)]
        assert any("EXTEND_TIMEOUT_USEC" in each for each in before), "loading asks for more time"
        undisturbed = served.post("/v1/completions", LONG).json()["choices"][0]["text"]
        until(lambda: any("WATCHDOG" in each for each in manager.heard()), served)

        text, signalled = "", False
        for frame in served.stream(LONG):
            text += "".join(choice["text"] for choice in frame["choices"])
            if not signalled:
                signalled = True
                served.process.send_signal(signal.SIGTERM)
                _refused_while_draining(served)
        assert text == undisturbed
        assert served.wait_end() == 0
        stopping = next(each for each in manager.heard() if "STOPPING" in each)
        assert int(stopping["EXTEND_TIMEOUT_USEC"]) > 30_000_000
        assert not served.instance_file.exists()
        assert "Traceback" not in served.text
    manager.close()


def _refused_while_draining(served: Served) -> None:
    until(lambda: served.get("/ready").status_code == 503, served)
    refused = served.post("/v1/completions", {"prompt": "late", "max_tokens": 2})
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert "draining" in refused.json()["error"]["message"]
    assert served.get("/health").status_code == 200


def test_a_killed_server_leaves_nothing_in_the_way_and_a_second_signal_ends_at_once(
    tmp_path: Path, models: tuple[str, ...]
) -> None:
    with serving(tmp_path, *models) as killed:
        port = killed.url().rpartition(":")[2]
        killed.process.kill()
        killed.wait_end()
        assert killed.instance_file.exists()
    with serving(tmp_path, *models, "--port", port) as served:
        served.wait_ready()
        frames = served.stream(LONG | {"n": 4})
        next(frames)
        served.process.send_signal(signal.SIGTERM)
        until(lambda: served.get("/ready").status_code == 503, served)
        served.process.send_signal(signal.SIGTERM)
        assert served.wait_end(10) == 128 + signal.SIGTERM
        assert not served.instance_file.exists()
        assert len(list((tmp_path / "run" / "ddtree").glob("instance-*"))) == 1, "that of the killed one"


def test_a_broken_configuration_file_falls_back_and_a_restart_keeps_the_process(
    tmp_path: Path, tiny_folder: Path
) -> None:
    good = tiny_config(tiny_folder / "target", tiny_folder / "drafter", tree_budget=6)
    keep(good, tmp_path / "state" / "ddtree" / "last-good.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text('mode = "trree"\n')
    with serving(tmp_path, "--config", str(broken)) as served:
        served.wait_ready()
        ready = served.get("/ready").json()
        assert ready["status"] == "degraded"
        assert "trree" in ready["reason"] and "last good" in ready["reason"]
        assert served.get("/runtime/status", headers=served.key).json()["config"]["tree_budget"] == 6

        broken.write_text((tmp_path / "state" / "ddtree" / "last-good.toml").read_text())
        assert served.post("/runtime/restart", headers=served.key).status_code == 202
        until(lambda: "starting anew" in served.text, served)
        served.wait_ready()
        assert served.get("/ready").json()["status"] == "ready", "with the mended file, in the same process"
        assert served.post("/runtime/stop", headers=served.key).status_code == 202
        assert served.wait_end() == 0


# What keeps it from coming up


def refusal(home: Path, *options: str, **variables: str) -> tuple[int, str]:
    """Exit code and stderr of a `serve` that is to end by itself."""
    folders = {name: str(home / name) for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME")}
    done = subprocess.run(
        [sys.executable, "-m", "console", "serve", *options],
        cwd=ROOT,
        env=os.environ | folders | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not done.stdout
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


@pytest.mark.case("E8")
def test_a_public_address_without_a_key_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    code, said = refusal(tmp_path, "--host", "0.0.0.0", "--port", "0", DDTREE_API_KEY="")
    assert code == 3
    assert len(said.splitlines()) == 1 and "DDTREE_API_KEY" in said


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, said = refusal(tmp_path, "--port", str(taken.getsockname()[1]))
    assert code == 1
    assert len(said.splitlines()) == 1 and "in use" in said and "another" in said


def test_a_wrong_option_is_never_replaced_by_the_last_good_configuration(
    tmp_path: Path, tiny_folder: Path
) -> None:
    keep(tiny_config(tiny_folder / "target"), tmp_path / "XDG_STATE_HOME" / "ddtree" / "last-good.toml")
    code, said = refusal(tmp_path, "--mode", "trree")
    assert code == 2 and "trree" in said
    code, said = refusal(tmp_path, "--config", str(tmp_path / "not-there.toml"))
    assert code == 2 and "not-there.toml" in said
    (tmp_path / "broken.toml").write_text("mode = 7\n")
    code, said = refusal(tmp_path, "--config", str(tmp_path / "broken.toml"), "--no-fallback")
    assert code == 2 and "mode" in said
    code, said = refusal(tmp_path, "--cors-origin", "*")
    assert code == 2 and "--cors-origin" in said


# Fall-back and last good


async def test_a_model_that_does_not_load_falls_back_once_and_says_why(
    tmp_path: Path, tiny_folder: Path
) -> None:
    file = tmp_path / "last-good.toml"
    runtime = LocalRuntime(tiny_config(tmp_path / "nothing-here"))
    with pytest.raises(ConfigRejected, match="nothing-here"):
        await come_up(runtime, file)
    await runtime.aclose()

    keep(tiny_config(tiny_folder / "target", tiny_folder / "drafter"), file)
    runtime = LocalRuntime(tiny_config(tmp_path / "nothing-here"))
    await come_up(runtime, file)
    status = await runtime.status()
    assert status.state is EngineState.DEGRADED
    assert "nothing-here" in status.reason
    assert (await collect(runtime, ask()))[-1].reason in ("stop", "length")
    await runtime.aclose()


async def test_a_last_good_configuration_that_fails_too_is_not_tried_again(tmp_path: Path) -> None:
    keep(tiny_config(tmp_path / "gone-too"), tmp_path / "last-good.toml")
    runtime = LocalRuntime(tiny_config(tmp_path / "nothing-here"))
    with pytest.raises(ConfigRejected, match="gone-too"):
        await come_up(runtime, tmp_path / "last-good.toml")
    await runtime.aclose()


@pytest.mark.parametrize("fall_back", [True, False])
async def test_a_console_falls_back_as_a_server_does_unless_told_not_to(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, fall_back: bool
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    keep(tiny_config(tiny_folder / "target", tiny_folder / "drafter"), last_good_file())
    runtime = await open_runtime(tiny_config(tmp_path / "nothing-here"), fall_back)
    wanted = EngineState.DEGRADED if fall_back else EngineState.FAILED
    while (status := await runtime.status()).state is not wanted:
        assert status.state in (EngineState.LOADING, EngineState.FAILED)
        await asyncio.sleep(0.02)
    assert "nothing-here" in status.reason
    await runtime.aclose()


async def test_a_configuration_is_kept_only_after_it_served_without_failure(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "state" / "last-good.toml"
    runtime = LocalRuntime(tiny_config(tiny_folder / "target", tiny_folder / "drafter"))
    await runtime.wait_ready()
    keeping = asyncio.create_task(keep_once_proved(runtime, file, seconds=0.5, look_every_s=0.02))
    await asyncio.sleep(0.2)
    assert not file.exists()
    await settle(file.exists)
    plan = await runtime.preview({"tree_budget": 4})
    await runtime.apply({"tree_budget": 4}, plan.revision)
    await settle(lambda: recall(file) == runtime.config)
    assert recall(file).tree_budget == 4
    keeping.cancel()
    await runtime.aclose()


def test_an_unreadable_last_good_file_counts_as_none(tmp_path: Path) -> None:
    assert recall(tmp_path / "none.toml") is None
    (tmp_path / "bad.toml").write_bytes(b"mode = \xff")
    assert recall(tmp_path / "bad.toml") is None
    keep(validate({"mode": "chain"}), tmp_path / "good.toml")
    assert recall(tmp_path / "good.toml") == validate({"mode": "chain"})
    assert [each.name for each in tmp_path.glob("*draft*")] == []


# Telling the service manager


def test_notifications_reach_the_socket_and_children_do_not_inherit_it(manager: Manager) -> None:
    variables = {
        "NOTIFY_SOCKET": manager.name,
        "WATCHDOG_USEC": "2000000",
        "WATCHDOG_PID": str(os.getpid()),
        "A": "1",
    }
    notifier = Notifier.from_environment(variables)
    assert variables == {"A": "1"}
    assert notifier.watchdog_s == 2.0
    notifier.ready("serving\nwell")
    notifier.reloading("again")
    notifier.stopping("over", 40.0)
    ready, reloading, stopping = manager.heard()
    assert ready["READY"] == "1" and ready["STATUS"] == "serving well"
    now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    assert 0 <= now - int(reloading["MONOTONIC_USEC"]) < 60_000_000
    assert stopping["STOPPING"] == "1" and stopping["EXTEND_TIMEOUT_USEC"] == "40000000"


def test_without_a_manager_or_with_one_that_is_gone_nothing_happens(tmp_path: Path) -> None:
    for address in (None, str(tmp_path / "gone"), "@gone"):
        Notifier(address).ready("serving")
    other = Notifier.from_environment({"WATCHDOG_USEC": "5", "WATCHDOG_PID": "1"})
    assert other.watchdog_s is None, "meant for another process"


async def test_the_watchdog_starves_when_the_engine_hangs_and_lives_on_work_and_idleness(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    manager = Manager(f"@ddtree-watchdog-{os.getpid()}")
    runtime = LocalRuntime(tiny_config(tiny_folder / "target", tiny_folder / "drafter", max_seq_len=400))
    orders = Orders(runtime, drain_seconds=0.2)
    attending = asyncio.create_task(attend(runtime, orders, Notifier(manager.name, watchdog_s=0.4), None))
    await runtime.wait_ready()
    await settle(lambda: any("READY" in each for each in manager.heard()))
    assert await fed(manager), "idle"
    working = asyncio.create_task(collect(runtime, ask(max_tokens=300, ignore_eos=True)))
    assert await fed(manager), "decoding"
    await working

    import runtime.engine as engine_module

    released = threading.Event()
    decode_round = engine_module.decode_round

    def hang(*arguments: Any) -> Any:
        released.wait()
        return decode_round(*arguments)

    monkeypatch.setattr(engine_module, "decode_round", hang)
    stuck = asyncio.create_task(collect(runtime, ask()))
    await settle(lambda: runtime.stalled_s > 0.4)
    assert not await fed(manager), "hanging"
    released.set()
    await stuck
    assert await fed(manager), "going on"
    orders.stop()
    await attending
    await runtime.aclose()
    manager.close()


async def fed(manager: Manager) -> bool:
    """Whether the watchdog hears anything within a while."""
    manager.heard().clear()
    await asyncio.sleep(0.5)
    return any("WATCHDOG" in each for each in manager.heard())


async def test_reading_the_configuration_anew_applies_what_is_live_and_survives_a_bad_file(
    tiny_folder: Path,
) -> None:
    manager = Manager(f"@ddtree-reload-{os.getpid()}")
    runtime = LocalRuntime(tiny_config(tiny_folder / "target", tiny_folder / "drafter"))
    await runtime.wait_ready()
    wanted = runtime.config.changed({"temperature": 0.5, "dtype": "bfloat16"})
    await reload(runtime, lambda: wanted, Notifier(manager.name))
    assert (runtime.config.temperature, runtime.config.dtype) == (0.5, "float32")
    assert [sorted(each)[-2] for each in manager.heard()] == ["RELOADING", "READY"]

    def bad() -> RuntimeConfig:
        return validate({"mode": "trree"})

    await reload(runtime, bad, Notifier(manager.name))
    assert runtime.config.temperature == 0.5
    assert "READY" in manager.heard()[-1], "it goes on as it was"
    await runtime.aclose()
    manager.close()


# Draining and waiting


async def test_a_drain_lets_accepted_requests_finish_and_ends_the_rest_saying_why(tiny_folder: Path) -> None:
    config = tiny_config(tiny_folder / "target", max_concurrency=1, max_seq_len=400)
    runtime = LocalRuntime(config)
    await runtime.wait_ready()
    first = await begun(runtime, ask(max_tokens=300, ignore_eos=True))
    second = asyncio.create_task(collect(runtime, ask()))
    await settle(lambda: load_of(runtime, running=1, waiting=1))
    assert await runtime.drain(30.0) == 0
    assert first.result()[-1].reason == "length"
    assert second.result()[-1].reason in ("stop", "length")
    with pytest.raises(RuntimeUnavailable, match="draining") as refused:
        await collect(runtime, ask())
    assert refused.value.retry_after_s
    assert await runtime.requests(), "what ran can still be looked at"
    await runtime.aclose()


async def begun(runtime: LocalRuntime, request: GenerateRequest) -> asyncio.Task[list[GenerateEvent]]:
    """A request that has given its first token."""
    first_token = asyncio.Event()

    async def run() -> list[GenerateEvent]:
        events = []
        async for event in runtime.generate(request):
            events.append(event)
            if isinstance(event, TokensEmitted):
                first_token.set()
        return events

    task = asyncio.create_task(run())
    await first_token.wait()
    return task


async def load_of(runtime: LocalRuntime, running: int, waiting: int) -> bool:
    status = await runtime.status()
    return (status.running, status.waiting) == (running, waiting)


async def test_what_does_not_finish_in_the_drain_time_is_ended_and_what_waited_may_be_sent_again(
    tiny_folder: Path,
) -> None:
    runtime = LocalRuntime(tiny_config(tiny_folder / "target", max_concurrency=1, max_seq_len=1000))
    await runtime.wait_ready()
    running = await begun(runtime, ask(max_tokens=900, ignore_eos=True))
    waiting = asyncio.create_task(collect(runtime, ask()))
    await settle(lambda: load_of(runtime, running=1, waiting=1))
    assert await runtime.drain(0.0) == 2
    finished = (await running)[-1]
    assert finished.reason == "cancelled" and "drain time" in str(finished.error)
    with pytest.raises(RuntimeUnavailable, match="drain time"):
        await waiting
    await runtime.aclose()


async def test_a_request_whose_turn_does_not_come_in_time_is_turned_away(tiny_folder: Path) -> None:
    runtime = LocalRuntime(
        tiny_config(tiny_folder / "target", max_concurrency=1, max_seq_len=1000, queue_timeout=0.05)
    )
    await runtime.wait_ready()
    running = await begun(runtime, ask(max_tokens=900, ignore_eos=True))
    with pytest.raises(RuntimeBusy, match="queue_timeout") as refused:
        await collect(runtime, ask())
    assert refused.value.retry_after_s
    assert (await running)[-1].reason == "length", "the one that runs is left alone"
    await runtime.aclose()


async def test_clients_take_turns_and_each_keeps_its_own_order(tiny_folder: Path) -> None:
    runtime = LocalRuntime(tiny_config(tiny_folder / "target", max_concurrency=1))
    await runtime.wait_ready()
    served: list[str] = []

    async def run(client: str, name: str) -> None:
        request = GenerateRequest(prompt="abc", client=client, sampling=ask().sampling)
        async for event in runtime.generate(request):
            if event.kind == "admitted":
                served.append(name)

    async with asyncio.TaskGroup() as group:
        for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1"):
            group.create_task(run(name[0], name))
    assert [name for name in served if name[0] == "a"] == ["a1", "a2", "a3", "a4"]
    assert served.index("c1") < served.index("a3") and served.index("b2") < served.index("a4")
    await runtime.aclose()


# The listener beside a runtime of somebody else


async def test_a_listener_serves_a_runtime_that_outlives_it(tmp_path: Path) -> None:
    import httpx
    from fake_runtime import FakeRuntime

    from runtime.http_security import Keys

    runtime = FakeRuntime()
    listener = Listener(runtime, Keys(None, "operator-key"), ServerSettings(port=0))
    listener.start()
    async with httpx.AsyncClient(base_url=listener.url, trust_env=False) as client:
        assert (await client.get("/ready")).status_code == 200
        assert (await client.get("/runtime/status")).status_code == 401
        headers = {"Authorization": "Bearer operator-key"}
        assert (await client.post("/runtime/stop", headers=headers)).status_code == 409
        async with client.stream("GET", "/runtime/events", headers=headers) as events:
            begun = time.monotonic()
            await asyncio.to_thread(listener.stop)
            await events.aread()
        assert time.monotonic() - begun < 30, "an open event stream does not hold it up"
    assert not runtime.closed
    assert not [each for each in threading.enumerate() if each.name == "ddtree-http"]

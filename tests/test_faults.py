"""Days of an operator under faults: every seed is a plan, and `make faults` runs many more of them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fault_checks import MORE_DESCRIPTORS, Report, run_day
from fault_day import undisturbed
from fault_nursery import Nursery, nursery
from fault_soak import slope, soak
from fault_world import Asked, Console, World, small_disk, until, write_models
from fuzz_targets import terminal_inputs
from test_security import objects_of, readable_by_others

SEEDS = range(20)


@dataclass(frozen=True)
class Ground:
    """Where days are run: models, logs, a disk that can be filled if there is one, and what every request gets."""

    folder: Path
    models: Path
    logs: Path
    nursery: Nursery
    small: bool
    texts: dict[tuple[Any, ...], str]

    def day(self, seed: int, layouts: bool = False) -> Report:
        folder = self.folder / f"day-{seed}"
        return run_day(
            seed, folder, self.models, self.logs, self.nursery, self.texts, small=self.small, layouts=layouts
        )


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    root = tmp_path_factory.mktemp("faults")
    models, logs = write_models(root / "models"), root / "logs"
    logs.mkdir()
    with small_disk(root / "disk") as disk, nursery() as children:
        folder = disk or root
        world = World(folder / "undisturbed", models, logs, children)
        try:
            texts = undisturbed(world)
        finally:
            world.close()
        yield Ground(folder, models, logs, children, disk is not None, texts)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_day_under_faults_loses_nothing(ground: Ground, seed: int) -> None:
    report = ground.day(seed)
    assert not report.problems, "\n".join((*report.story, *report.problems))


def test_the_day_over_and_over_holds_no_more_than_at_first(ground: Ground) -> None:
    world = World(ground.folder / "soak", ground.models, ground.logs, ground.nursery, ground.small)
    try:
        soaked = soak(world, ground.texts, seed=1, turns=8)
    finally:
        world.close()
    assert not soaked.problems, "\n".join(soaked.problems)
    warm = soaked.samples[len(soaked.samples) // 2 :]
    assert max(each.memory for each in warm) - warm[0].memory < 48 * 2**20
    assert max(each.descriptors for each in warm) - warm[0].descriptors <= MORE_DESCRIPTORS
    assert max(each.threads for each in warm) - warm[0].threads <= 4


def test_a_rise_is_told_from_noise() -> None:
    noisy = [(60.0 * at, 100.0 + (3.0 if at % 2 else -3.0)) for at in range(60)]
    rising = [(at, value + at / 60.0) for at, value in noisy]
    assert slope("flat", noisy).is_flat and not slope("rising", rising).is_flat
    assert slope("rising", rising).per_hour == pytest.approx(60.0, rel=0.1)
    noise = random.Random(3)
    hour = [(5.0 * at, 300.0 + noise.gauss(0.0, 0.5)) for at in range(720)]
    assert slope("flat", hour).is_flat and slope("flat", hour).named_from < 1.0
    assert not slope("3 MiB an hour", [(at, value + 3 * at / 3600) for at, value in hour]).is_flat


LEAVES = b"q\x03\x11"
"""Keys that end a console."""


def test_no_bytes_on_the_terminal_end_the_console(ground: Ground) -> None:
    world = World(ground.folder / "bytes", ground.models, ground.logs, ground.nursery)
    world.write_config()
    world.start_server()
    console = world.console = Console(world)
    try:
        until(lambda: b"[1 Live]" in console.seen, "the console is there")
        for content in terminal_inputs(seed=1, count=150):
            console.press(content.translate(None, LEAVES))
            time.sleep(0.005)
            assert console.child.status() is None, (content, console.seen[-1500:])
        console.press(b"\x1b[201~\x1b\x1b\x1b\x1b")
        assert b"Traceback" not in console.seen
    finally:
        world.close()


KEYS = {
    "DDTREE_API_KEY": "inference-key-5f3a9c",
    "HF_TOKEN": "hf_" + "Ab3" * 12,
    "SGLANG_API_KEY": "plainword-of-a-key",
    "OPENAI_API_KEY": "sk-proj-" + "a1B2" * 8,
}


def test_no_key_is_written_anywhere_and_files_are_their_owners_alone(ground: Ground) -> None:
    world = World(ground.folder / "keys", ground.models, ground.logs, ground.nursery, extra=KEYS)
    try:
        world.write_config()
        world.start_server()
        operator = (world.folder / "run" / "ddtree" / "operator.key").read_text().strip()
        assert world.ask(Asked("a")).refused == 401
        assert world.get("/runtime/status")[0] == 401 and world.status()["state"] == "ready"
        status, output = world.run("snapshot", "save", "--label", "keys", "--no-fetch-originals")
        assert status == 0, output
        assert world.run("snapshot", "save", "--note", f"token: {KEYS['HF_TOKEN']}")[0] == 3
        assert world.run("doctor", "--json")[0] in (0, 1)
        assert world.end_server() == 0
        secrets = [*KEYS.values(), operator]
        written = {path: path.read_bytes() for path in world.folder.rglob("*") if path.is_file()}
        written |= {path: path.read_bytes() for path in ground.logs.glob("keys-*")}
        written[world.store] = objects_of(world.store)
        for path, content in written.items():
            for secret in secrets:
                assert secret.encode() not in content or path.name == "operator.key", path
        assert readable_by_others(world.folder) == []
    finally:
        world.close()

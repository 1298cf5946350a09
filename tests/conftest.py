"""Fixtures that every test may use. Tests need no network: `ddtree model fetch` has put the default model in place."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import httpx
    from api_server import ApiServer
    from constructed import ConstructedDrafter, Reference
    from engine_driver import MakeEngine

    from runtime.models import Checkpoint
    from runtime.tokenizer import ChatTokenizer

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
"""Programs that each use all cores, as tests side by side do, slow each other several times by waiting in loops."""

KEPT_VARIABLES = ("DDTREE_CACHE_DIR", "DDTREE_MODEL_WHEEL")
LONGEST = (
    "test_verify.py",
    "test_flip.py",
    "test_lossless.py",
    "test_console_tmux.py",
    "test_console_robust.py",
    "test_cli.py",
    "test_attach_tmux.py",
    "test_ctl.py",
    "test_serve.py",
    "test_gang.py",
    "test_train_commands.py",
)
"""Files that start first, so that all workers end together."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest files first; the order within a file stays."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.fixture(scope="session", autouse=True)
def no_settings_of_this_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hide the operator's own configuration file and `DDTREE_*` variables from all tests and their children."""
    with pytest.MonkeyPatch.context() as patch:
        for variable in list(os.environ):
            if variable.startswith("DDTREE_") and variable not in KEPT_VARIABLES:
                patch.delenv(variable)
        for folder in ("CONFIG", "STATE", "DATA"):
            patch.setenv(f"XDG_{folder}_HOME", str(tmp_path_factory.mktemp(f"{folder.lower()}-home")))
        yield


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """One thread for torch: with another number sums differ in their last bit, and a test must not depend on which
    test a worker ran before it."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def default_checkpoint() -> Checkpoint:
    """The default model as opened from the cache; an error that names `ddtree model fetch` if it is not there."""
    from runtime.models import open_checkpoint

    return open_checkpoint()


@pytest.fixture(scope="session")
def default_tokenizer(default_checkpoint: Checkpoint) -> ChatTokenizer:
    return default_checkpoint.load_tokenizer()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random `target` (288 tokens, 3 layers) and a `drafter` for it (block 8)."""
    import tiny_models

    folder = tmp_path_factory.mktemp("tiny")
    target = tiny_models.write_target(folder / "target")
    tiny_models.write_drafter(folder / "drafter", target)
    return folder


@pytest.fixture(scope="session")
def tiny_reference(tiny_folder: Path) -> Reference:
    """The tiny target in transformers' own classes."""
    from constructed import Reference

    return Reference(tiny_folder / "target", 288)


@pytest.fixture
def make_engine(tiny_folder: Path) -> Iterator[MakeEngine]:
    """Builds engines over the tiny models from settings; at the end of the test each must have all its slots back.

    `target` and `drafter` name other folders; `propose` is a constructed drafter.
    """
    import engine_driver
    import tiny_models

    from runtime.engine import Engine
    from runtime.loader import load

    made: list[Engine] = []

    def make(propose: ConstructedDrafter | None = None, **settings: Any) -> Engine:
        target = settings.pop("target", tiny_folder / "target")
        drafter = settings.pop("drafter", tiny_folder / "drafter")
        config = tiny_models.tiny_config(target, drafter, **settings)
        loaded = load(config)
        made.append(
            Engine(
                engine_driver.with_scripts(loaded, propose) if propose else loaded, config, default_budget=8
            )
        )
        return made[-1]

    yield make
    for engine in made:
        engine_driver.run(engine)
        engine.check_integrity()
        engine.scheduler.drop_prefixes()
        assert engine.models.cache.free_slots == engine.models.cache.slots
        assert not engine.requests()
        engine.loaded.close()


@pytest.fixture(scope="module")
def tiny_api(tiny_folder: Path) -> Iterator[ApiServer]:
    """A server of the tiny models: every byte comes up in their texts, most of them no whole characters."""
    import tiny_models
    from api_server import CONTEXT, ApiServer

    from runtime.listener import ServerSettings

    config = tiny_models.tiny_config(
        tiny_folder / "target",
        tiny_folder / "drafter",
        max_seq_len=CONTEXT,
        max_queue=64,
        kv_slots=5 * (CONTEXT + 65),
    )
    with ApiServer(config, ServerSettings(keep_alive_s=0.2, max_body_bytes=200_000)) as server:
        yield server


@pytest.fixture
def http(tiny_api: ApiServer) -> Iterator[httpx.Client]:
    """Bare HTTP to that server."""
    import httpx

    with httpx.Client(base_url=tiny_api.url, timeout=60) as client:
        yield client

"""From a configuration or an address to a runtime; what a runtime needs loads only when it is opened."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.config import RuntimeConfig
from runtime.interface import Runtime

if TYPE_CHECKING:
    from runtime.http_client import HttpRuntime
    from runtime.snapshot_port import Keeper


_attendants: set[asyncio.Task[None]] = set()
"""A loop keeps no reference to its tasks."""


async def open_runtime(
    config: RuntimeConfig,
    fall_back: bool = False,
    origins: Mapping[str, str] | None = None,
    keeper: Keeper | None = None,
) -> Runtime:
    """An in-process runtime for `config`; returns at once and loads afterwards.

    With `fall_back` the last good configuration is tried once if `config` does not come up, and kept once proved.
    `origins`: field to where its value came from. `keeper`: what keeps snapshots of it.
    """
    from runtime.local import LocalRuntime

    runtime = LocalRuntime(config, origins=origins, keeper=keeper)
    if fall_back:
        from runtime.last_good import last_good_file
        from runtime.serve import look_after

        task = asyncio.create_task(look_after(runtime, last_good_file()))
        _attendants.add(task)
        task.add_done_callback(_attendants.discard)
    return runtime


def prompts_of(path: Path) -> list[dict[str, Any]]:
    """The prompts in a file of this host, to be sent with a job; raises ValueError naming file and line."""
    from runtime.prompt_sets import read_prompts

    return [{**prompt} for prompt in read_prompts(path)]


def author(program: str) -> str:
    """Who changes something, as others are told: the program, the user and the host."""
    import getpass
    import platform

    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid {os.getuid()}"
    return f"{program} of {user}@{platform.node()}"


def opened(url: str) -> Callable[[], Awaitable[Runtime]]:
    """What gives the runtime behind `url`; a wrong address or a missing key is refused here and now."""
    runtime = attach(url)

    async def give() -> Runtime:
        return runtime

    return give


def attach(url: str, env: Mapping[str, str] = os.environ) -> HttpRuntime:
    """The runtime behind `url`; whether it answers shows with the first call.

    The operator key is that of the running instance of this user which serves `url`, else `DDTREE_OPERATOR_KEY`: a
    key that was generated here is never sent elsewhere.

    Raises:
        ConfigRejected: `url` is no address, or the key file must not be used.
        AccessRefused: no key is known for `url`.
    """
    from runtime.http_client import AccessRefused, HttpRuntime
    from runtime.instance import instances, read_key_file, runtime_folder

    key = env.get("DDTREE_OPERATOR_KEY")
    for instance in instances(runtime_folder(env)):
        if instance.serves(url) and instance.key_file:
            key = read_key_file(Path(instance.key_file))
    if not key:
        raise AccessRefused(
            f"no operator key is known for {url}: no running instance here serves it and DDTREE_OPERATOR_KEY is not set"
        )
    return HttpRuntime(url, key)
